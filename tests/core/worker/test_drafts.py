"""Speculation may not show: the same ids with any drafts, any K and any split of K."""

import numpy as np
import pytest
import torch
from deepinfer.api.plan import Fault
from deepinfer.api.speculative import Drafts
from rig import Desk, Req, expected, load, make_runner
from test_runner import EVERYTHING, prompt


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"))


class Scripted:
    """Drafts from a script: slot -> the ids that will follow each text, or luck.

    ``right``: how often a draft is the true id. Splits K among rows at random.
    """

    taps = (0, 1)  # not the last layer, which runs all rows for who taps it

    def __init__(self, gamma, right, seed=0, confidence=False):
        self.draft_len, self.right, self.confidence = gamma, right, confidence
        self.rng = np.random.default_rng(seed)
        self.truth, self.table = {}, None
        self.kept = []

    def bind(self, kv, slots):
        raise AssertionError("the test binds the table itself")

    def allot(self, slots, eligible, k):
        assert len(slots) == len(eligible)
        lengths = np.zeros(len(eligible), np.int64)
        for _ in range(k):
            room = np.flatnonzero(lengths < eligible.numpy())
            if len(room):
                lengths[self.rng.choice(room)] += 1
        return torch.from_numpy(lengths)

    def commit(self, taps, kept):
        assert set(taps.hidden) == {0, 1}
        assert all(len(h) == len(kept) == len(taps.batch.ids) for h in taps.hidden.values())
        place = zip(taps.slot_of_token.tolist(), taps.batch.positions.tolist(), strict=True)
        self.kept += [p for p, k in zip(place, kept.tolist(), strict=True) if k]

    def propose(self, anchors, slots):
        ids = np.zeros((len(slots), self.draft_len), np.int64)
        for r, slot in enumerate(slots.tolist()):
            length = int(self.table.length[slot])
            assert int(anchors[r]) == int(self.table.tokens[slot, length - 1])
            text = self.truth.get(slot, [])
            for k in range(self.draft_len):
                known = length + k < len(text) and self.rng.random() < self.right
                ids[r, k] = text[length + k] if known else self.rng.integers(3, 320)
        sure = torch.full(ids.shape, 0.5) if self.confidence else None
        return Drafts(torch.from_numpy(ids), sure)


def setup(naive, requests, gamma, right, seed=0):
    drafter = Scripted(gamma, right, seed)
    runner = make_runner(naive, drafter=drafter)
    drafter.table = runner._rig.slots
    desk = Desk(runner, gamma=gamma, seed=seed)
    for slot, request in enumerate(requests):
        drafter.truth[slot] = [*request.prompt, *expected(naive, request)[0]]
        desk.enter(request, slot)
    return desk, drafter


def requests_of(seed, names):
    rng = np.random.default_rng(seed)
    return [
        Req(
            prompt(seed * 7 + i, int(rng.integers(1, 9))),
            12 + int(rng.integers(1, 9)),
            seed=int(rng.integers(1 << 62)),
            params=EVERYTHING[name],
        )
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0], ids=["perfect", "good", "garbage"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_the_text_is_the_same(naive, gamma, right):
    for seed, names in enumerate(
        [("plain", "sampled", "penalised"), ("biased", "short", "filtered", "bad-words")]
    ):
        requests = requests_of(seed, names)
        desk, drafter = setup(naive, requests, gamma, right, seed)
        desk.finish(requests)
        for slot, request in enumerate(requests):
            assert request.out == drafter.truth[slot][len(request.prompt) :]


def test_perfect_drafts_save_steps(naive):
    (request,) = requests = requests_of(3, ["sampled"])
    request.limit = len(request.prompt) + 13
    desk, _ = setup(naive, requests, 3, 1.0)
    desk.finish(requests, chunk=99, draft_rows=99)
    assert desk.step == 1 + 3  # the prompt gives one id, then three times 1 + 3
    assert request.out == expected(naive, request)[0]


def test_the_limit_cuts_drafts(naive):
    """Two tokens are left: of three drafts one runs, and nothing is written behind the limit."""
    (request,) = requests = requests_of(4, ["plain"])
    request.limit = len(request.prompt) + 3
    desk, _ = setup(naive, requests, 3, 1.0)
    desk.run([(request, desk.chunk(request, len(request.prompt)))])
    out = desk.run([(request, desk.decode(request))], draft_rows=3)
    assert out.counts.tolist() == [2] and request.finished
    dead = desk.run([(request, desk.decode(request))], draft_rows=3)
    assert dead.counts.tolist() == [0]


def test_the_drafter_learns_of_kept_rows_only(naive):
    requests = requests_of(5, ["plain", "sampled"])
    desk, drafter = setup(naive, requests, 2, 0.6)
    desk.finish(requests)
    for slot, request in enumerate(requests):
        kept = [position for s, position in drafter.kept if s == slot]
        assert kept == list(range(len(request.text) - 1)), "each position once, in order"


def test_masks_and_drafts(naive):
    def after(text):
        return [v for v in range(3, 320) if (v + text[-1]) % 5 < 2]

    for right in (1.0, 0.5):
        requests = requests_of(6, ["sampled", "plain", "penalised"])
        requests[0].allowed = requests[2].allowed = after
        desk, drafter = setup(naive, requests, 3, right)
        desk.finish(requests)
        for slot, request in enumerate(requests):
            assert request.out == drafter.truth[slot][len(request.prompt) :]


def test_a_fault_behind_accepted_drafts_waits_for_its_step(naive):
    """What stands before the broken line is emitted; the next step meets the fault first."""
    (request,) = requests = requests_of(8, ["plain"])
    desk, _ = setup(naive, requests, 3, 1.0)
    truth = expected(naive, request)[0]
    request.allowed = lambda text: [] if len(text) == len(request.prompt) + 3 else range(320)
    desk.run([(request, desk.chunk(request, len(request.prompt)))])
    out = desk.run([(request, desk.decode(request))], draft_rows=3)
    assert out.counts.tolist() == [2] and out.faults.tolist() == [Fault.NONE]
    out = desk.run([(request, desk.decode(request))], draft_rows=3)
    assert out.counts.tolist() == [0] and out.faults.tolist() == [Fault.NOTHING_ALLOWED]
    assert request.out == truth[:3]


def test_confidence_and_drafts_come_back(naive):
    requests = requests_of(9, ["plain", "plain"])
    drafter = Scripted(2, 0.0, confidence=True)
    runner = make_runner(naive, drafter=drafter)
    drafter.table = runner._rig.slots
    desk = Desk(runner, gamma=2)
    for slot, request in enumerate(requests):
        desk.enter(request, slot)
    requests[0].prompt.extend([5, 6])
    desk.new.clear()
    for slot, request in enumerate(requests):
        desk.enter(request, slot)
    middle = (requests[0], desk.chunk(requests[0], 1))
    last = (requests[1], desk.chunk(requests[1], len(requests[1].prompt)))
    out = desk.run([middle, last])
    assert out.tokens.shape == (2, 3) and out.drafts.shape == (2, 2)
    assert out.drafts[0].tolist() == [0, 0] and out.drafts[1].min() >= 3
    assert out.confidence.tolist() == [[0, 0], [0.5, 0.5]]
