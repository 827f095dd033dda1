"""Our model with all, some or none of its quantisers, and what its layers made.

Which quantisers run is a matter of ops: without any, ``quantize`` returns what it gets and pools
are float32; with those of caches alone, scaled linears are plain ones.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import torch
from automodel_peer import LayerSteps
from deepinfer.api.backend import Impl, OpContext
from deepinfer.models.weights import LoadPlan, load_weights
from deepinfer.ops.invariant import grouped_linear, invariant_ops, linear
from deepinfer.ops.table import OpSet
from deepinfer.parallel import single
from deepinfer.worker.kvpool import KVPool
from torch import Tensor
from v41_harness import CPU, PAGE, Golden, Play, Rig

HEARD = (
    *("hyper_mix", "hyper_merge", "engram_block", "latent_attention_block"),
    *("scaled_moe_block", "route", "select_sparse"),
)


class PlainRig(Rig):
    """A golden model in float32 whose ops quantise nothing (``off``) or what is cached."""

    def __init__(self, golden: Golden, which: str) -> None:
        self.golden, self.config, self.dtype = golden, golden.config, torch.float32
        provided = invariant_ops() | (_unquantised() if which == "off" else _plain_linears())
        context = OpContext(
            dtype=torch.float32, device=CPU, activation_dtype=torch.float32, num_threads=1
        )
        self.ops = OpSet(provided, "oracle", context)
        adapter = golden.adapter
        self.model = adapter.build(self.config, self.ops, single())
        plan = LoadPlan(known=adapter.unread, dequantize=True)
        load_weights(
            self.model, adapter.weights(self.config), golden.checkpoint, self.ops, self.dtype,
            plan=plan,
        )  # fmt: skip


def _unquantised() -> dict[str, Impl]:
    return {"quantize": Impl(lambda x, kind: x)}


def _plain_linears() -> dict[str, Impl]:
    def scaled_linear(x: Tensor, w: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear(x, w, None, out_dtype)

    return {"scaled_linear": Impl(scaled_linear), "grouped_scaled_linear": Impl(grouped_linear)}


class FloatPlay(Play):
    """A text whose pools are float32."""

    def __init__(self, rig: Rig, texts: list, **more: Any) -> None:
        super().__init__(rig, texts, cache="bfloat16", **more)
        groups = [
            dataclasses.replace(g, entry=dataclasses.replace(g.entry, dtype="float32"))
            for g in self.spec.groups
        ]
        self.spec = dataclasses.replace(self.spec, groups=tuple(groups))
        pages = self.pool.num_pages
        self.pool = KVPool(self.spec, pages, PAGE, torch.float32, CPU, len(texts))
        for group in groups:
            for layer in group.layers:
                self.pool.tensor(group.name, layer).fill_(torch.nan)


def rig(golden: Golden, which: str) -> Rig:
    return golden.rig("f32") if which == "all" else PlainRig(golden, which)


def play(loaded: Rig, ids: Tensor, which: str) -> Play:
    return FloatPlay(loaded, [ids]) if which == "off" else Play(loaded, [ids], cache="packed")


def logits(loaded: Rig, ids: Tensor, which: str) -> tuple[Tensor, list[LayerSteps]]:
    """(float32[T, V], what each layer made) of a whole text in one step."""
    run, heard = play(loaded, ids, which), {name: [] for name in HEARD}
    with ExitStack() as stack:
        for name in HEARD:
            stack.enter_context(loaded.listen(name, heard[name], lambda args, out: out))
        out = run.logits([(0, len(ids))])
    return out, _layers(loaded, run, heard, len(ids))


def inputs(loaded: Rig, ids: Tensor, steps: list[LayerSteps]) -> list[tuple[Tensor, Tensor]]:
    """(streams before Engram, mix) that each of our layers read."""
    with torch.inference_mode():
        flow, _ = loaded.model._begin(Play(loaded, [ids]).batch([(0, len(ids))]))
    return [(flow.x, flow.pre), *((s.stream, s.pre) for s in steps[:-1])]


def _layers(loaded: Rig, run: Play, heard: dict[str, list], count: int) -> list[LayerSteps]:
    config, found = loaded.config, []
    engrams, picks = iter(heard["engram_block"]), iter(heard["select_sparse"])
    layers = loaded.model.layers
    for i, layer in enumerate(layers):
        chosen = next(picks) if layer.attn.indexer is not None else None
        mixes = tuple(heard["hyper_mix"][2 * i : 2 * i + 2])
        found.append(
            LayerSteps(
                stream=heard["hyper_merge"][2 * i + 1],
                pre=mixes[1][0],
                mixes=mixes,
                engram=None if layer.engram is None else next(engrams),
                attention=heard["latent_attention_block"][i][0],
                experts=heard["scaled_moe_block"][i],
                router=heard["route"][i],
                selected=None if chosen is None else chosen.entries,
                candidates=_candidates(config, i, chosen, count),
                compressed=_entries(loaded, run, i, "compressed", "nvfp4", count),
                index_keys=_entries(loaded, run, i, "index", "mxfp4", count),
            )
        )
    return found


def _candidates(config: Any, layer: int, chosen: Any, count: int) -> Tensor | None:
    """bool[T, T] of visible entries in the blocks kept, where this layer published them."""
    blocks = config.publishes(layer)
    if chosen is None or blocks is None:
        return None
    none = -(-count // blocks.size)
    inside = torch.zeros((count, none + 1), dtype=torch.bool)
    inside.scatter_(1, torch.where(chosen.blocks < 0, none, chosen.blocks).long(), True)
    return inside[:, :-1].repeat_interleave(blocks.size, 1)[:, :count].tril()


def _entries(
    loaded: Rig, run: Play, layer: int, group: str, kind: str, count: int
) -> Tensor | None:
    """What a source left in its cache, as values."""
    if layer not in loaded.config.kv_sources:
        return None
    ratio = loaded.config.ratios[layer]
    cache = run.pool.tensor(f"{group}-r{ratio}", layer)
    j = torch.arange(count // ratio)
    rows = cache[run.table[0, j // cache.shape[1]].long(), j % cache.shape[1]]
    return loaded.ops.unpack_rows(rows, kind, torch.float32) if rows.dtype == torch.uint8 else rows
