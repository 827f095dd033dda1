"""The drafter ``dspark``: a draft checkpoint beside a dense target. Spec section 2."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.speculative import DraftNeeds
from deepinfer.errors import ConfigError, PluginError
from deepinfer.layers import Linear
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.models.weights import LoadPlan, load_weights, weight_bytes
from deepinfer.ops.backend import build_ops
from torch import Tensor
from torch.nn.functional import pad

from deepinfer_speculative.dspark.backbone import Backbone, DraftRows
from deepinfer_speculative.dspark.base import BlockDrafter
from deepinfer_speculative.dspark.calibrated import Temperatures
from deepinfer_speculative.dspark.config import DSparkConfig, check_target, read_config
from deepinfer_speculative.dspark.weights import weight_rules
from deepinfer_speculative.options import take

if TYPE_CHECKING:
    from deepinfer.api.model import KVPools, Model
    from deepinfer.api.speculative import DrafterContext, DrafterTarget, SlotView, StepTaps
    from deepinfer.models.checkpoint import Checkpoint

MANY: Final = 1024
"""Rows of context that may wait for a draft that asks for them, on a CPU."""
MORE: Final = 8192
WAITING_BYTES: Final = 64 << 20
"""Elsewhere, where these rows do not take more than this: writing them, kernel by kernel, takes the
host as long as two steps of a small model, so it should be rare, and is one graph where there are
graphs.
"""


class DSparkDrafter(BlockDrafter):
    """Of a checkpoint in the format released for Qwen3.

    A further option, ``draft_weights``: ``int8`` drafts with eight-bit copies of all matrices, the
    vocabulary projection among them: a quarter of the bytes, and reading them is most of a small
    draft's time; ``same`` does not; ``auto`` (usual) is ``int8`` on backend ``cpu``, the only one
    that has it.
    """

    def __init__(self, context: DrafterContext, target: DrafterTarget) -> None:
        checkpoint, config = _open(context)
        model = _load(context, target, checkpoint, config)
        gamma = context.draft_length(config.block)
        temperatures = Temperatures.asked(
            context, str(resolve(_folder(context)).path), gamma, target.device
        )
        super().__init__(context, target, config.block, model, temperatures)
        self.config, self.taps, self._backbone = config, config.taps, model
        self._page_size = context.page_size
        self._pages = -(-config.block // context.page_size)  # of one block in scratch
        shape = config.shape
        pages = context.max_num_seqs * self._pages
        size = (pages, context.page_size, shape.kv_heads, shape.head_dim)
        self._scratch = (
            torch.zeros(size, dtype=target.dtype, device=target.device),
            torch.zeros(size, dtype=target.dtype, device=target.device),
        )
        self._blocks: dict[int, tuple[Any, Tensor]] = {}
        width = len(self.taps) * config.shape.hidden_size
        self._waiting = _Waiting(width, target.dtype.itemsize, target.device, model.ops)
        eager = target.device.type == "cpu" and target.record is None
        self._steps = _Steps() if eager else None  # then these wait in its place
        self._recorded: bool | None = None
        self._record = target.record
        self._write_all: Callable[[], Any] | None = None
        self._wrote_all = False

    @classmethod
    def needs(cls, context: DrafterContext) -> DraftNeeds:
        """Hidden rows of the trained layers, and keys and values of the draft's own layers."""
        checkpoint, config = _open(context)
        shape, itemsize = config.shape, context.dtype.itemsize
        group = KVGroup(
            name="dspark",
            kind="full",
            layers=tuple(range(shape.layers)),
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            bytes_per_token=2 * shape.kv_heads * shape.head_dim * itemsize * shape.layers,
        )
        rules = [r for r in weight_rules(config) if not r.optional]
        return DraftNeeds(
            draft_len=context.draft_length(config.block),
            taps=config.taps,
            # Of another draft's keys and values none may be found.
            kv=KVSpec((group,), f"dspark-{itemsize}-{checkpoint.fingerprint()[:16]}"),
            weight_bytes=weight_bytes(rules, context.dtype, True),
        )

    @contextmanager
    def recorded(self, tokens: int, propose: bool) -> Iterator[None]:
        """Of a step that drafts, context is written at once; of others, it waits."""
        assert self._kv is not None, "bind comes first"
        waits = not propose and tokens <= self._waiting.most
        # Before it is recorded, too: what waits then would be a part of the graph.
        if not (tokens and waits and self._waiting.fits(tokens)):
            self.settle(self._kv)
        self._recorded = not propose
        try:
            yield
        finally:
            self._recorded = None
        if waits:
            self._waiting.counted(tokens)

    def write(self, taps: StepTaps, slots: Tensor, kv: KVPools) -> None:
        """Keys and values of the draft's layers, from the target's hidden rows.

        Rows wait until a draft reads them or there are many. On a CPU, rows that are no text cost
        nothing, nor do most of those that are decoded while nobody drafts (:meth:`_thin`).
        """
        hidden, positions = [taps.hidden[layer] for layer in self.taps], taps.batch.positions
        if self._recorded is not None:
            if self._recorded and len(slots) <= self._waiting.most:
                self._waiting.append(hidden, positions, slots)
            else:
                self._backbone.write(torch.cat(hidden, -1), positions, slots, kv)
            return
        if self._steps is not None:
            self._write_later(self._steps, hidden, taps, slots, kv)
            return
        waiting = self._waiting
        if not waiting.fits(len(slots)):
            self.settle(kv)
        if not waiting.fits(len(slots)):
            self._backbone.write(torch.cat(hidden, -1), positions, slots, kv)
        elif len(slots):
            waiting.add(hidden, positions, slots)

    def _write_later(
        self, steps: _Steps, hidden: list[Tensor], taps: StepTaps, slots: Tensor, kv: KVPools
    ) -> None:
        """On a CPU."""
        if not steps.fits(len(slots)) and steps.count > steps.most // 2:
            self._thin(steps, kv)
        if not steps.fits(len(slots)):
            self.settle(kv)
        steps.add(hidden, taps.batch.positions, slots, taps.slot_of_token)
        if not steps.fits(0):
            self.settle(kv)

    def _thin(self, steps: _Steps, kv: KVPools) -> None:
        """Make room while nobody drafts: of the older half, prompts' rows are written, and decoded
        ones are nothing to a draft from now on.

        A small model's step has no other arithmetic to hide this behind, so that writing them all
        costs 2 % of a load at which nobody drafts. Drafts that come back have the prompts and what
        was decoded last, which is what they go by (docs/decisions/0024).
        """
        older = steps.take(steps.most // 2)
        decoded = older.alone.nonzero().flatten()
        prompts = (~older.alone).nonzero().flatten()
        if len(decoded):
            self._backbone.empty(older.slots[decoded], kv)
        if len(prompts):
            rows = older.rows[prompts], older.positions[prompts], older.slots[prompts]
            self._backbone.write(*rows, kv)

    def settle(self, kv: KVPools) -> None:
        """Write the rows that wait; if they are many and the device has graphs, as one of all that
        may wait.
        """
        if self._steps is not None:
            if self._steps.count:
                rows = self._steps.take()
                if len(rows.slots):
                    self._backbone.write(rows.rows, rows.positions, rows.slots, kv)
            return
        waiting = self._waiting
        if not waiting.count:
            return
        if self._record is None or 2 * waiting.count < waiting.most:
            self._backbone.write(*waiting.found(), kv)
        else:
            self._all_written(self._record, kv)
        waiting.clear()

    def _all_written(self, record: Callable[..., Callable[[], Any]], kv: KVPools) -> None:
        def write() -> None:
            self._backbone.write(*self._waiting.everything(), kv)

        if self._wrote_all and self._write_all is None:  # the first time kernels are compiled
            try:
                self._write_all = record(write)
            except (RuntimeError, PluginError):  # memory is short, or an op waits for the host
                self.release()
        self._wrote_all = True
        (self._write_all or write)()

    def release(self) -> None:
        """Give the graph back, and record none from here on."""
        self._record = self._write_all = None

    def hidden(
        self, anchors: Tensor, slots: Tensor, view: SlotView, kv: KVPools
    ) -> tuple[Tensor, Tensor]:
        """Both heads read the rows behind the final norm."""
        block = self.config.block
        ids = anchors[:, None].repeat(1, block)
        ids[:, 1:] = self.config.mask_token
        out = self._backbone.block(ids.flatten(), self._rows(slots, view), kv)
        out = out.view(len(slots), block, -1)[:, : self.draft_len].contiguous()
        return out, out

    def _rows(self, slots: Tensor, view: SlotView) -> DraftRows:
        """Positions and attention of the blocks behind these texts."""
        block, ops, size = self.config.block, self._backbone.ops, self._page_size
        start = (view.length[slots] - 1).clamp(min=0)
        place = torch.arange(block, device=slots.device)
        table = view.pages[:, : -(-view.longest // size)][slots].repeat_interleave(block, 0)
        length = start.repeat_interleave(block, 0)
        rows = torch.arange(len(length) + 1, dtype=torch.int32, device=slots.device)
        plan, written = self._block_plan(len(slots), rows)
        return DraftRows(
            positions=(start[:, None] + place).flatten(),
            context=ops.plan_attention(table, length, rows, size),
            own=plan,
            slots=written,
            scratch=self._scratch,
        )

    def _block_plan(self, count: int, rows: Tensor) -> tuple[Any, Tensor]:
        """Attention of ``count`` blocks over themselves, and where their keys go. Kept: graphs
        read them.
        """
        if count in self._blocks:
            return self._blocks[count]
        block, pages = self.config.block, self._pages
        mine = torch.arange(count * pages, device=rows.device).view(count, pages)
        table = mine.int().repeat_interleave(block, 0)
        length = torch.full((count * block,), block, dtype=torch.int64, device=rows.device)
        plan = self._backbone.ops.plan_attention(table, length, rows, self._page_size)
        place = torch.arange(block, device=rows.device)
        written = (mine[:, :1] * self._page_size + place).flatten()
        self._blocks[count] = plan, written
        return plan, written


class _Waiting:
    """At most ``most`` rows of context that nobody has needed yet: tapped layers side by side
    [n, width], positions and slots int64[n].
    """

    def __init__(self, width: int, itemsize: int, device: torch.device, ops: Any) -> None:
        self._ops = ops
        self.most = MANY
        if device.type != "cpu":
            self.most = max(MANY, min(MORE, WAITING_BYTES // (width * itemsize)))
        self._width = width
        self._rows: Tensor | None = None
        self._places = torch.zeros((2, self.most), dtype=torch.int64, device=device)
        self._numbers = torch.arange(self.most, device=device)
        self.count = self._steps = 0
        self._end = torch.zeros(1, dtype=torch.int64, device=device)  # ``count``, for graphs

    def fits(self, count: int) -> bool:
        return self.count + count <= self.most

    def add(self, hidden: list[Tensor], positions: Tensor, slots: Tensor) -> None:
        """A step's rows [n, H] of each layer, as many as fit."""
        all_rows = self._all(hidden)
        began, self.count = self.count, self.count + len(slots)
        torch.cat(hidden, -1, out=all_rows[began : self.count])
        torch.stack((positions, slots), out=self._places[:, began : self.count])
        self._end += len(slots)
        self._steps += 1

    def append(self, hidden: list[Tensor], positions: Tensor, slots: Tensor) -> None:
        """The same as a graph does it; :meth:`counted` follows on the host."""
        kept = self._all(hidden), self._places, self._end
        self._ops.append_rows(hidden, (positions, slots), *kept)

    def counted(self, count: int) -> None:
        """So many rows were appended."""
        self.count += count
        self._steps += 1

    def _all(self, hidden: list[Tensor]) -> Tensor:
        if self._rows is None:
            self._rows = hidden[0].new_zeros((self.most, self._width))
        return self._rows

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those that wait, slot −1 where a later step has a row for the same slot."""
        assert self._rows is not None, "something was added"
        positions, slots = self._places[:, : self.count]
        if self._steps > 1:
            slots = _last_of_each(slots)
        return self._rows[: self.count], positions, slots

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same for graphs: ``most`` rows, slot −1 behind those that wait too."""
        assert self._rows is not None, "something was added"
        slots = torch.where(self._numbers < self._end, self._places[1], -1)
        return self._rows, self._places[0], _last_of_each(slots)

    def clear(self) -> None:
        """They wait no longer."""
        self._end.zero_()
        self.count = self._steps = 0


class _Rows(NamedTuple):
    """Tapped layers side by side [n, width], positions and slots int64[n], no slot twice;
    ``alone`` bool[n]: the only one of its request in its step, so it was decoded.
    """

    rows: Tensor
    positions: Tensor
    slots: Tensor
    alone: Tensor


class _Steps:
    """On a CPU, what waits step by step: one that nobody drafts behind costs a copy of its rows,
    and which of them are text is asked when they leave.
    """

    def __init__(self) -> None:
        self.most, self.count = MANY, 0
        self._kept: deque[tuple[Tensor, ...]] = deque()

    def fits(self, count: int) -> bool:
        return self.count + count <= self.most

    def add(self, hidden: list[Tensor], positions: Tensor, slots: Tensor, request: Tensor) -> None:
        """A step's rows [n, H] of each layer, which may change behind it."""
        self._kept.append((torch.cat(hidden, -1), positions.clone(), slots, request.clone()))
        self.count += len(slots)

    def take(self, most: int = 0) -> _Rows:
        """The oldest, so that no more than ``most`` wait on."""
        taken = []
        while self.count > most:
            taken.append(self._kept.popleft())
            self.count -= len(taken[-1][2])
        lengths = torch.tensor([len(slots) for _, _, slots, _ in taken])
        step = torch.arange(len(taken)).repeat_interleave(lengths)
        rows, positions, slots, request = map(torch.cat, zip(*taken, strict=True))
        text = (slots >= 0).nonzero().flatten()
        alone = _alone(step[text], request[text])
        slots = _last_of_each(slots[text])
        last = (slots >= 0).nonzero().flatten()
        text, slots, alone = text[last], slots[last], alone[last]
        return _Rows(rows[text], positions[text], slots, alone)


def _alone(step: Tensor, request: Tensor) -> Tensor:
    """bool[n]: no neighbour is of the same request and step; those of one lie side by side."""
    same = (request[1:] == request[:-1]) & (step[1:] == step[:-1])
    return ~(pad(same, (1, 0)) | pad(same, (0, 1)))


def _last_of_each(slots: Tensor) -> Tensor:
    """−1 where a slot of int64[n] comes again behind."""
    order = slots.sort(stable=True)
    again = order.values[1:] == order.values[:-1]
    found = slots.clone()
    found[order.indices[:-1]] = torch.where(again, -1, order.values[:-1])
    return found


def _folder(context: DrafterContext) -> str:
    """Where the draft lies."""
    if context.model is None:
        raise ConfigError(
            f"speculative: method {context.method!r} needs a draft checkpoint.",
            setting="speculative",
            next_step="Give model=PATH or a hub id.",
        )
    return context.model


def _open(context: DrafterContext) -> tuple[Checkpoint, DSparkConfig]:
    checkpoint = open_checkpoint(resolve(_folder(context), setting="speculative"))
    config = read_config(checkpoint.config)
    check_target(config, checkpoint.config, context.config)
    return checkpoint, config


def _load(
    context: DrafterContext,
    target: DrafterTarget,
    checkpoint: Checkpoint,
    config: DSparkConfig,
) -> Backbone:
    """The draft in the engine's type; embedding and head are the target's if it has none."""
    length = context.config.max_model_len + config.block + 1
    kind = take(context.options, "draft_weights", str, "auto", among=("auto", "same", "int8"))
    eight = kind == "int8" or (kind == "auto" and target.ops.origin["linear"] == "cpu")
    ops = _eight_bits(target.ops) if eight else target.ops
    model = Backbone(config, ops, length)
    load_weights(
        cast("Model", model),  # of a model, loading needs ``load`` alone
        weight_rules(config),
        checkpoint,
        ops,
        target.dtype,
        plan=LoadPlan(known=()),
    )
    model.share(target.model)
    if eight:
        model.head = _int8(model.head, ops)
    return model


def _eight_bits(ops: Any) -> Any:
    """The same ops over weights of eight bits: drafts move a little, texts never."""
    if ops.origin["linear"] != "cpu":
        raise ConfigError(
            "speculative: draft_weights='int8' is built for backend 'cpu' alone.",
            setting="speculative",
            next_step="Leave it at 'auto'.",
        )
    from deepinfer.native.backend import NativeCPUBackend

    return build_ops(NativeCPUBackend(), replace(ops.context, quantization="int8"))


def _int8(layer: Linear, ops: Any) -> Linear:
    """A copy of a projection, which the target may share, in eight bits."""
    from deepinfer.native.weights import prepare_linear, unpack

    if layer.weight.dtype == torch.int8:
        return layer
    copy = Linear(ops)
    copy.weight = prepare_linear(unpack(layer.weight), "int8")
    return copy
