"""The drafter of who does not speculate, and what core does for who does: taps and memory.

Where you are: beside ``host``, which opens a drafter in the order that ``api.speculative`` tells,
and ``runner``, which calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.api.speculative import DrafterContext, DraftNeeds, Drafts, VerifierContext
from deepinfer.errors import ModelLoadError, PluginError, UnsupportedError
from deepinfer.resolution import Named
from deepinfer.sampling.verify import EqualityVerifier

if TYPE_CHECKING:
    from deepinfer.api.kv import KVSpec
    from deepinfer.api.model import DeviceBatch, KVPools
    from deepinfer.api.speculative import Drafter, DrafterTarget, SlotView, StepTaps, Verifier
    from deepinfer.config import EngineConfig
    from deepinfer.models.checkpoint import Checkpoint
    from deepinfer.resolution import Resolution


class NullDrafter:
    """No speculation: a drafter of length 0, so that the runner has one path."""

    draft_len = 0
    taps: tuple[int, ...] = ()

    def bind(self, kv: KVPools, slots: SlotView) -> None:
        """Nothing to read."""

    def allot(self, slots: Tensor, eligible: Tensor, k: int) -> Tensor:
        """No drafts to anyone."""
        return torch.zeros_like(eligible)

    def commit(self, taps: StepTaps | None, kept: Tensor) -> None:
        """Nothing to remember."""

    def propose(self, anchors: Tensor, slots: Tensor) -> Drafts:
        """int64[R, 0]."""
        return Drafts(anchors.new_zeros((len(anchors), 0)), None)

    def recorded(self, tokens: int, propose: bool) -> AbstractContextManager[None]:
        """Any step may be."""
        return nullcontext()


class HiddenTaps:
    """Hidden rows of a step, for a drafter; a :class:`api.model.Taps`.

    Attributes:
        layers: whose rows are wanted.
        hidden: layer -> [T, H] of this step.
        batch: this step's token rows.
        slot_of_token: int64[T].
    """

    def __init__(self, layers: tuple[int, ...], batch: DeviceBatch, slot_of_token: Tensor) -> None:
        self.layers = layers
        self.hidden: dict[int, Tensor] = {}
        self.batch = batch
        self.slot_of_token = slot_of_token

    def put(self, layer: int, hidden: Tensor) -> None:
        """Called by the model; the tensor must not change before the step's end."""
        self.hidden[layer] = hidden


def drafter_context(
    config: EngineConfig,
    resolution: Resolution,
    target: tuple[Any, Checkpoint],
    dtype: torch.dtype,
) -> DrafterContext | None:
    """What a drafter may know before anything is loaded; None where nobody speculates.

    ``target``: the family's config and the checkpoint.
    """
    asked = config.speculation()
    if asked is None or not resolution.all("speculator"):
        return None
    return DrafterContext(
        method=resolution.get("speculator").name,
        model=asked.model,
        options=asked.options,
        acceptance=asked.acceptance,
        config=target[0],
        raw=target[1].config,
        checkpoint=target[1],
        dtype=dtype,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        draft_length=asked.draft_length,
    )


def draft_needs(
    config: EngineConfig, resolution: Resolution, shape: Any, checkpoint: Checkpoint
) -> DraftNeeds:
    """The same from a configuration; nothing is loaded. ``shape``: the family's config."""
    dtype = {"bfloat16": torch.bfloat16}.get(config.dtype, torch.float32)
    return drafter_needs(
        resolution, drafter_context(config, resolution, (shape, checkpoint), dtype)
    )


def drafter_needs(resolution: Resolution, context: DrafterContext | None) -> DraftNeeds:
    """What the chosen drafter asks for; nothing where nobody speculates."""
    if context is None:
        return DraftNeeds(draft_len=0)
    with _said_of(context):
        needs: DraftNeeds = resolution.load("speculator", "drafter").needs(context)
    if needs.draft_len < 1:
        raise PluginError(
            f"{resolution.get('speculator')} asks for drafts of {needs.draft_len} tokens.",
            setting="speculative",
        )
    return needs


def open_drafter(
    resolution: Resolution, context: DrafterContext | None, target: DrafterTarget
) -> tuple[Drafter, Verifier]:
    """The chosen drafter and the verifier of the chosen rule."""
    equality = EqualityVerifier(target.ops, target.sampler)
    if context is None:
        return NullDrafter(), equality
    with _said_of(context):
        drafter: Drafter = resolution.load("speculator", "drafter")(context, target)
    chosen = resolution.get("speculator")
    named: Any = Named(chosen, drafter, "allot", "commit", "propose")
    if context.acceptance == "exact":
        return named, equality
    rule = VerifierContext(ops=target.ops, sampler=target.sampler, drafter=drafter)
    judge: Any = Named(chosen, chosen.load_part("verifier")(rule), "verify")
    return named, judge


@contextmanager
def _said_of(context: DrafterContext) -> Iterator[None]:
    """Errors in a draft's checkpoint name it: the target has a config.json and tensors too."""
    try:
        yield
    except (ModelLoadError, UnsupportedError) as why:
        if context.model is None:
            raise
        raise type(why)(
            f"Draft {context.model}: {why.message}", setting=why.setting, next_step=why.next_step
        ) from why


def with_drafts(spec: KVSpec, needs: DraftNeeds) -> KVSpec:
    """The target's groups and, behind its layers, the drafter's, in the same pages and blocks."""
    if needs.kv is None:
        return spec
    names = {group.name for group in spec.groups}
    for group in needs.kv.groups:
        if group.name in names:
            raise PluginError(f"The drafter's KV group {group.name!r} is one of the model's.")
    offset = first_draft_layer(spec)
    mine = tuple(
        replace(group, layers=tuple(offset + layer for layer in group.layers))
        for group in needs.kv.groups
    )
    return replace(spec, groups=spec.groups + mine, layout=f"{spec.layout}+{needs.kv.layout}")


def first_draft_layer(spec: KVSpec) -> int:
    """The number of a drafter's layer 0 in the pool of a target with these groups."""
    return 1 + max((layer for group in spec.groups for layer in group.layers), default=-1)


class DraftPools:
    """A pool as a drafter sees it: its own layers, from 0. An :class:`api.model.KVPools`."""

    def __init__(self, pools: KVPools, offset: int) -> None:
        self._pools = pools
        self._offset = offset

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) of one of the drafter's layers."""
        return self._pools.layer(self._offset + index)

    def tensor(self, group: str, layer: int) -> Tensor:
        """The one tensor of a layer in a group with an entry."""
        return self._pools.tensor(group, self._offset + layer)
