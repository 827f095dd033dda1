"""A toy model with state groups, and a scripted device for it: :class:`StateExecutor`.

Where you are: beside ``fake.py`` and ``toy.py``, without torch. The model has what DeepSeek-V4.1
has, one number wide: a window of early entries, each made of those before it; a compressed entry
for every two tokens, made of an open group; late layers with windows of their own that begin at a
floor. On the device windows are rings in state blocks, addressed by position, exactly as long as
the contract of snapshots allows, and blocks start as garbage. So a block that was copied too late,
not at all, for another boundary or another floor changes tokens. :class:`StateText` is the same
model on a whole text, for the naive loop: no rings, blocks or pages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np

from deepinfer.api.executor import ModelFacts
from deepinfer.api.kv import Entry, KVGroup, KVSpec, Truncation
from deepinfer.api.plan import BatchPlan, Request
from deepinfer.engine.request import floor_of
from deepinfer.testing.fake import FakeExecutor, FakeScript, Work
from deepinfer.testing.toy import M64, draw, entry, toy_logits

_ENTRY = Entry(width=8, dtype="uint8")


@dataclass
class StateScript(FakeScript):
    """A device whose model keeps state. ``late``: late layers; ``keep``: 0 truncates nothing.

    ``slack``: rows of a ring beyond the window, what the contract of snapshots asks for.
    """

    window: int = 3
    late: int = 3
    keep: int = 0
    snapshots: int = 4

    @property
    def slack(self) -> int:
        return self.page_size + self.draft_len + 1

    @property
    def open_rows(self) -> int:
        """The power of two that holds a group and all drafts behind it."""
        return 1 << (self.draft_len + 1).bit_length()

    @property
    def truncation(self) -> Truncation | None:
        if not self.keep:
            return None
        reach = (self.late - 1) * (self.window - 1)
        return Truncation(keep=self.keep, reach=reach, first_layer=2)

    def facts(self) -> ModelFacts:
        layers = tuple(range(1 + self.late))
        rings = self.window + self.slack
        groups = (
            KVGroup(
                name="compressed",
                kind="full",
                layers=(0,),
                entry=_ENTRY,
                ratio=2,
                bytes_per_token=4,
            ),
            KVGroup(name="window", kind="state", layers=layers, entry=_ENTRY, rows=rings),
            KVGroup(name="open", kind="state", layers=(0,), entry=_ENTRY, rows=self.open_rows),
        )
        return replace(
            super().facts(),
            kv=KVSpec(groups=groups, layout="toy-state", truncation=self.truncation),
            state_blocks=self.max_num_seqs + self.snapshots,
        )

    def text(self, request: Request) -> StateText:
        """What the naive loop asks: all rows of all layers where truncation may not show."""
        cut = self.truncation
        exact = cut is not None and cut.keep > cut.reach
        return StateText(self, 0 if exact else floor_of(request, cut))


class StateText:
    """The model on one whole text: a :class:`~deepinfer.testing.toy.Text`."""

    def __init__(self, script: StateScript, floor: int) -> None:
        self.window = script.window
        self.floor = floor
        self.early: list[int] = []
        self.sums: list[int] = []  # of compressed entries that a position sees
        self.late: list[list[int]] = [[] for _ in range(script.late)]

    def push(self, token: int) -> int:
        """Run one more token; 0 below the floor."""
        p, first = len(self.early), max(0, len(self.early) - self.window + 1)
        x = entry(weigh(self.early[first:p], first), token, p)
        self.early.append(x)
        total = self.sums[-1] if p else 0
        if p % 2:
            total = (total + p * pool(self.early[p - 1], x)) & M64
        self.sums.append(total)
        x = entry(total, x, p)
        for k, ring in enumerate(self.late):
            ring.append(x)
            if p < self.floor:
                x = 0
                continue
            begin = max(first, self.floor if k else 0)
            x = entry(weigh(ring[begin : p + 1], begin), x, p)
        return x

    def cut(self, length: int) -> None:
        """Take back what lies behind a length."""
        for column in (self.early, self.sums, *self.late):
            del column[length:]


def pool(one: int, two: int) -> int:
    """The compressed entry of a group."""
    return entry(one, two, 3)


def weigh(values: list[int], first: int) -> int:
    """A window's entries in one number; each counts by its position."""
    return sum([value * (2 * p + 1) for p, value in enumerate(values, first)]) & M64


class StateExecutor(FakeExecutor):
    """A scripted device with state blocks; ``script`` is a :class:`StateScript`.

    ``early``, ``late``[k] and ``groups``: one list of numbers for each block.
    """

    script: StateScript

    def __init__(self, script: StateScript) -> None:
        super().__init__(script)
        self.kv = np.zeros((script.num_pages, script.page_size // 2), np.uint64)
        garbage, blocks = random.Random(script.seed), script.max_num_seqs + script.snapshots
        rows = script.window + script.slack

        def fill(count: int) -> list[list[int]]:
            return [[garbage.getrandbits(64) for _ in range(count)] for _ in range(blocks)]

        self.early = fill(rows)
        self.late = [fill(rows) for _ in range(script.late)]
        self.groups = fill(script.open_rows)
        self.texts: dict[int, tuple[list[int], StateText]] = {}

    def _forward(self, plan: BatchPlan) -> list[Work]:
        self._copy(plan.saves)
        self._copy(plan.restores)
        return super()._forward(plan)

    def _copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        assert len({target for _, target in pairs}) == len(pairs), "a block is written twice"
        for kind in (self.early, self.groups, *self.late):
            found = [list(kind[source]) for source, _ in pairs]
            for (_, target), values in zip(pairs, found, strict=True):
                kind[target] = values

    # A row: what ``fake`` reads and writes as a running sum is all in the blocks here.

    def _read(self, slot: int, count: int) -> int:
        return 0

    def _write(self, slot: int, summary: int, token: int, position: int) -> int:
        p, request = position, self.slots[slot]
        assert request is not None
        early, open_rows = self.early[slot], self.groups[slot]
        first = max(0, p - self.script.window + 1)
        x = entry(self._window(early, first, p), token, p)
        early[p % len(early)] = x
        if p % 2:
            page, offset = divmod(p, self.script.page_size)
            group = pool(open_rows[(p - 1) % len(open_rows)], x)
            self.kv[self.tables[slot][page], offset // 2] = group
        open_rows[p % len(open_rows)] = x
        x = entry(self._compressed(slot, (p + 1) // 2), x, p)
        for k in range(self.script.late):
            if k and p < request.floor:
                return 0
            ring = self.late[k][slot]
            ring[p % len(ring)] = x
            begin = max(first, request.floor if k else 0)
            x = entry(self._window(ring, begin, p + 1), x, p)
        return x if p >= request.floor else 0

    def _window(self, ring: list[int], first: int, end: int) -> int:
        return weigh([ring[p % len(ring)] for p in range(first, end)], first)

    def _compressed(self, slot: int, count: int) -> int:
        """The sum of the first compressed entries, through the page table."""
        if not count:
            return 0
        table, per_page = self.tables[slot], self.script.page_size // 2
        pages = [table[i] for i in range(-(-count // per_page))]
        weights = np.arange(1, 2 * count, 2, dtype=np.uint64)
        return int((self.kv[pages].reshape(-1)[:count] * weights).sum(dtype=np.uint64))

    def _drafts(self, work: Work) -> list[int]:
        """From the text, not from the blocks: wrong state shows in tokens, not in drafts."""
        slot, vocab, wanted = self.slots[work.slot], self.script.vocab_size, self.script.draft_len
        assert slot is not None
        if not work.logits or slot.length + 1 >= slot.limit or not wanted:
            return slot.drafts + [0] * (wanted - len(slot.drafts))
        owner, text = self.texts.get(work.slot, (None, None))
        if owner is not slot.origin or text is None:
            text = StateText(self.script, slot.floor)
            self.texts[work.slot] = slot.origin, text
        for token in slot.tokens[len(text.early) : slot.length]:
            text.push(token)
        token, drafts = slot.tokens[-1], list[int]()
        for k in range(wanted):
            z = toy_logits(text.push(token), vocab)
            position = slot.length + k
            token = draw(z, slot.seed, position + 1, slot.params.temperature)
            if entry(slot.seed, position, 99) % 10 >= 7:
                token = (token + 1) % vocab
            drafts.append(token)
        text.cut(slot.length)
        slot.drafts = drafts
        return drafts
