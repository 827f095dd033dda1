"""The model on golden checkpoints, driven by hand: steps of any rows of any texts, simple pools.

A :class:`Rig` is a loaded model; a :class:`Play` runs texts on it in steps, as a worker would:
pages in any order, state blocks, floors, late rows. ``listen`` records what an op was given.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from deepinfer.api.backend import OpContext
from deepinfer.api.kv import KVOptions
from deepinfer.api.model import DeviceBatch, StepRequests
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.deepseek_v41.adapter import DeepseekV41Adapter
from deepinfer.models.registry import model_config
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights
from deepinfer.ops.invariant import invariant_ops
from deepinfer.ops.table import OpSet
from deepinfer.parallel import single
from deepinfer.worker.kvpool import KVPool
from deepinfer.worker.late import late_batch
from recorded_order import recorded_ops
from safetensors.torch import load_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
PAGE = 16


class Golden:
    """A configuration's folder: its arrays by name, and its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrays = load_file(folder / "golden.safetensors")
        self.adapter = DeepseekV41Adapter()
        self.checkpoint = open_checkpoint(resolve(str(folder)))
        self.config = dataclasses.replace(
            model_config(self.adapter, self.checkpoint), max_model_len=2048
        )
        self._rigs: dict[tuple, Rig] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def prompts(self, mode: str, most: int = 10_000) -> list[str]:
        """Names of the recorded prompts of at most so many tokens."""
        names = {k.split("/")[0] for k in self.arrays if f"/{mode}/top_values" in k}
        return sorted((n for n in names if int(n[1:]) <= most), key=lambda n: int(n[1:]))

    def rig(
        self, mode: str, dequantize: bool = True, native: bool = False, recorded: bool = False
    ) -> Rig:
        """A loaded model; made once. On the invariant reference, or the native ops, or those that
        add up in the recorder's order.
        """
        key = (mode, dequantize, native, recorded)
        if key not in self._rigs:
            self._rigs[key] = Rig(self, *key)
        return self._rigs[key]


class Rig:
    """A golden model, loaded. ``mode`` f32 or bf16: the type of weights and of rows."""

    def __init__(
        self, golden: Golden, mode: str, dequantize: bool, native: bool, recorded: bool
    ) -> None:
        self.golden, self.config, self.dtype = golden, golden.config, DTYPES[mode]
        context = OpContext(
            dtype=self.dtype, device=CPU, activation_dtype=self.dtype, num_threads=1
        )
        provided = recorded_ops() if recorded else invariant_ops()
        if native:
            from deepinfer.native.backend import NativeCPUBackend

            provided = dict(NativeCPUBackend().provide(context))
        self.ops = OpSet(provided, "test", context)
        adapter = golden.adapter
        self.model = adapter.build(self.config, self.ops, single())
        plan = LoadPlan(known=adapter.unread, dequantize=dequantize)
        load_weights(
            self.model, adapter.weights(self.config), golden.checkpoint, self.ops, self.dtype,
            plan=plan,
        )  # fmt: skip

    def listen(self, name: str, heard: list, pick) -> Listener:
        """Within ``with``: append ``pick(args, result)`` of every call of an op."""
        return Listener(self.ops, name, heard, pick)


class Listener:
    """Puts a recording function in an op's place."""

    def __init__(self, ops: OpSet, name: str, heard: list, pick) -> None:
        self.ops, self.name, self.heard, self.pick = ops, name, heard, pick

    def __enter__(self) -> Listener:
        self.real = getattr(self.ops, self.name)

        def recording(*args):
            result = self.real(*args)
            self.heard.append(self.pick(args, result))
            return result

        setattr(self.ops, self.name, recording)
        return self

    def __exit__(self, *_) -> None:
        setattr(self.ops, self.name, self.real)


class Play:
    """Texts on one model. Text b has state block b and pages that were drawn at random.

    ``floors``: where each text's late layers begin; ``compact``: rows below are taken out.
    """

    def __init__(
        self, rig: Rig, texts, *, cache="auto", floors=None, compact=False, page=PAGE, seed=3,
        draft_len=0,
    ) -> None:  # fmt: skip
        self.rig, self.page, self.compact = rig, page, compact
        self.texts = [torch.as_tensor(t).long() for t in texts]
        self.done = [0] * len(texts)
        self.floors = torch.tensor(floors or [0] * len(texts))
        options = KVOptions(dtype_bytes=4, page_size=page, cache_dtype=cache, draft_len=draft_len)
        self.spec = rig.golden.adapter.kv_spec(rig.config, options)
        wide = -(-max(len(t) + 32 for t in self.texts) // page)
        order = torch.randperm(wide * len(texts), generator=torch.Generator().manual_seed(seed))
        self.table = order.view(len(texts), wide).int()
        self.pool = KVPool(self.spec, len(order), page, rig.dtype, CPU, len(texts))
        for group in self.spec.groups:  # what was never written may be anything
            for layer in group.layers:
                tensor = self.pool.tensor(group.name, layer)
                tensor.fill_(0x7F if tensor.dtype == torch.uint8 else torch.nan)

    def step(self, rows, padding: int = 0, dead=()) -> torch.Tensor:
        """Run (text, count) pairs in one step; returns the hidden rows of all of them."""
        batch = self.batch(rows, padding, dead)
        with torch.inference_mode():
            hidden = self.rig.model.forward(batch, self.pool)
        for text, count in rows:
            self.done[text] += 0 if text in dead else count
        return hidden[: len(hidden) - padding]

    def logits(self, rows, **more) -> torch.Tensor:
        with torch.inference_mode():
            return self.rig.model.logits(self.step(rows, **more))

    def batch(self, rows, padding: int = 0, dead=()) -> DeviceBatch:
        """The step as a worker builds it. ``dead`` texts keep their rows and write nothing."""
        text = torch.tensor([t for t, _ in rows])
        count = torch.tensor([c for _, c in rows])
        start = torch.tensor([self.done[t] for t, _ in rows])
        row = torch.arange(len(rows)).repeat_interleave(count)
        cu_q = torch.cat((torch.zeros(1, dtype=torch.long), count.cumsum(0)))
        position = torch.arange(len(row)) - cu_q[row] + start[row]
        ids = torch.cat([self.texts[t][self.done[t] : self.done[t] + c] for t, c in rows])
        page = self.table[text[row], position // self.page].long()
        alive = torch.tensor([t not in dead for t, _ in rows])[row]
        slots = torch.where(alive, page * self.page + position % self.page, -1)
        history = self._history(text[row], position)
        pad = [torch.zeros(padding, dtype=torch.long), torch.full((padding,), -1)]
        batch = DeviceBatch(
            ids=torch.cat((ids, pad[0])),
            positions=torch.cat((position, pad[0])),
            row_of_token=torch.cat((row, pad[1])),
            kv_slots=torch.cat((slots, pad[1])),
            attn=None,
            logit_rows=torch.arange(len(row)),
            requests=StepRequests(
                cu_q=cu_q.int(),
                starts=start,
                block_table=self.table[text],
                blocks=text,
                floors=self.floors[text],
            ),
            history=torch.cat((history, torch.full((padding, history.shape[1]), -1))),
        )
        below = (self.floors[text] - start).clamp(min=0).minimum(count)
        if not self.compact or not below.any():
            return batch
        late, place = late_batch(batch, self.rig.ops, below, int(below.sum()))
        return dataclasses.replace(batch, late=late, late_rows=place)

    def _history(self, text: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        found = np.full((len(text), self.spec.lookback), -1)
        for i, (t, p) in enumerate(zip(text.tolist(), position.tolist(), strict=True)):
            before = self.texts[t][max(0, p - self.spec.lookback) : p].flip(0)
            found[i, : len(before)] = before.numpy()
        return torch.from_numpy(found)

    def chunks(self, *sizes: int, text: int = 0) -> torch.Tensor:
        """Logits of a whole text, run in chunks of these sizes, the last of them repeated."""
        parts, plan = [], list(sizes)
        while self.done[text] < len(self.texts[text]):
            size = plan.pop(0) if len(plan) > 1 else plan[0]
            left = len(self.texts[text]) - self.done[text]
            parts.append(self.logits([(text, min(size, left))]))
        return torch.cat(parts)


def row_errors(golden: Golden, where: str, logits: torch.Tensor) -> torch.Tensor:
    """Largest error of each row's recorded largest logits; ``where``: prompt/mode."""
    ids = golden[f"{where}/top_ids"].long()
    return (logits.gather(1, ids) - golden[f"{where}/top_values"]).abs().amax(1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def same_sets(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """bool[T]: rows of ids that are equal as sets; −1 and what is missing on the right is none."""
    width = max(got.shape[1], want.shape[1])

    def sorted_rows(ids: torch.Tensor) -> torch.Tensor:
        ids = ids.long()
        return torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1).sort(1).values

    return (sorted_rows(got) == sorted_rows(want)).all(1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)
