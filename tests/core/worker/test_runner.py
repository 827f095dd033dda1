"""The runner against the naive loop: same ids whatever the steps are made of."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepinfer.api.plan import Fault
from rig import Desk, Req, expected, load, make_runner

EVERYTHING = {
    "plain": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "filtered": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "penalised": {
        "temperature": 0.0,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "biased": {"temperature": 0.5, "logit_bias": ((7, 4.0), (9, -5.0), (200, 3.5))},
    "few": {"temperature": 1.0, "allowed_token_ids": (3, 50, 51, 52, 319)},
    "short": {"temperature": 0.0, "min_len": 14, "stop_ids": tuple(range(0, 320, 2))},
    "bad-words": {"temperature": 0.0, "bad_words": tuple((i,) for i in range(100, 200))},
}


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"))


def prompt(seed, n):
    return np.random.default_rng(seed).integers(3, 320, n).tolist()


@pytest.mark.parametrize("name", EVERYTHING)
def test_one_request(naive, name):
    request = Req(prompt(1, 6), 20, seed=77, params=EVERYTHING[name])
    desk = Desk(make_runner(naive))
    desk.enter(request, 2)
    desk.finish([request])
    assert request.out == expected(naive, request)[0]


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches(naive, seed):
    """Chunks of any size beside decodes, several kinds of parameters in one batch."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(list(EVERYTHING))[:4]
    requests = [
        Req(prompt(seed * 9 + i, int(rng.integers(1, 19))), 0, seed=int(rng.integers(1 << 62)))
        for i in range(4)
    ]
    desk = Desk(make_runner(naive), seed=seed)
    for i, (request, name) in enumerate(zip(requests, names, strict=True)):
        request.params = EVERYTHING[name]
        request.limit = len(request.prompt) + int(rng.integers(1, 12))
        desk.enter(request, 3 - i)
    desk.finish(requests)
    for request in requests:
        assert request.out == expected(naive, request)[0]


def test_two_word_bans_follow_the_output(naive):
    plain = Req(prompt(5, 4), 18, params={"temperature": 0.0})
    ids = expected(naive, plain)[0]
    words = tuple(itertools.pairwise(ids))
    request = Req(plain.prompt, 18, params={"temperature": 0.0, "bad_words": words})
    desk = Desk(make_runner(naive))
    desk.enter(request, 0)
    desk.finish([request])
    assert request.out == expected(naive, request)[0] != ids
    assert request.out[0] == ids[0] and request.out[1] != ids[1]


def test_a_row_at_its_limit_is_dead(naive):
    """One step ahead, the host decodes a request that has ended: nothing may come of it."""
    ends, lives = Req(prompt(1, 5), 6), Req(prompt(2, 7), 14)
    for request in (ends, lives):
        request.params = {"temperature": 0.0, "frequency_penalty": 0.5}
    runner = make_runner(naive)
    desk = Desk(runner)
    pairs = [(r, desk.chunk(desk.enter(r, s), len(r.prompt))) for s, r in enumerate((ends, lives))]
    desk.run(pairs)
    assert len(ends.out) == 1 and ends.finished
    kv = runner._rig.kv
    for _ in range(3):
        own = [(p, o) for p in ends.pages for o in range(4)]
        before = [kv.layer(0)[0][p, o].clone() for p, o in own]
        out = desk.run([(ends, desk.decode(ends)), (lives, desk.decode(lives))])
        assert out.counts.tolist() == [0, 1] and out.faults.tolist() == [0, 0]
        after = [kv.layer(0)[0][p, o] for p, o in own]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    desk.finish([lives])
    assert lives.out == expected(naive, lives)[0]


def test_a_slot_is_used_again(naive):
    desk = Desk(make_runner(naive))
    for i in range(3):
        request = Req(prompt(i, 3 + 5 * i), 12 + 4 * i, seed=i, params={"temperature": 1.0})
        desk.enter(request, 1)
        desk.finish([request])
        assert request.out == expected(naive, request)[0]
        desk.leave(request)


def test_a_request_resumes_after_preemption(naive):
    request = Req(prompt(3, 5), 24, seed=5, params={"temperature": 0.8, "frequency_penalty": 0.3})
    desk = Desk(make_runner(naive))
    desk.enter(request, 0)
    desk.run([(request, desk.chunk(request, 5))])
    for _ in range(4):
        desk.run([(request, desk.decode(request))])
    desk.leave(request)
    desk.enter(request, 3)  # with all its tokens, elsewhere
    while request.done < len(request.text):
        before = len(request.text)
        desk.run([(request, desk.chunk(request, min(4, before - request.done)))])
        if len(request.text) > before:
            break
    desk.finish([request])
    assert request.out == expected(naive, request)[0]


def test_chunks_that_emit_nothing(naive):
    request = Req(prompt(1, 9), 12, params={"temperature": 0.0})
    desk = Desk(make_runner(naive))
    desk.enter(request, 0)
    out = desk.run([(request, desk.chunk(request, 4))])
    assert out.tokens.tolist() == [[0]] and out.counts.tolist() == [0] and out.drafts is None
    desk.finish([request])
    assert request.out == expected(naive, request)[0]


def test_no_rows(naive):
    out = Desk(make_runner(naive)).run([])
    assert out.tokens.shape == (0, 1) and out.counts.shape == (0,)


def test_masks(naive):
    def after(text):
        return [v for v in range(3, 320) if (v + text[-1]) % 7 == 3]

    requests = [
        Req(prompt(1, 5), 18, seed=1, params={"temperature": 0.8}, allowed=after),
        Req(prompt(2, 9), 18, seed=2, params={"temperature": 0.8}),
        Req(prompt(3, 2), 18, seed=3, params=EVERYTHING["penalised"], allowed=after),
    ]
    desk = Desk(make_runner(naive))
    for slot, request in enumerate(requests):
        desk.enter(request, slot)
    desk.finish(requests)
    for request in requests:
        assert request.out == expected(naive, request)[0]


def test_a_mask_that_allows_nothing_faults_its_row_only(naive):
    bad = Req(prompt(1, 5), 18, allowed=lambda text: [])
    good = Req(prompt(2, 5), 9, params={"temperature": 0.0})
    desk = Desk(make_runner(naive))
    for slot, request in enumerate((bad, good)):
        desk.enter(request, slot)
    desk.finish([bad, good])
    assert bad.out == [] and bad.faults == [Fault.NOTHING_ALLOWED]
    assert good.out == expected(naive, good)[0]


def test_nan_faults_its_row_only(naive, monkeypatch):
    runner = make_runner(naive)
    bad, good = (Req(prompt(i, 5), 9, params={"temperature": 0.0}) for i in (1, 2))
    desk = Desk(runner)
    pairs = [(r, desk.chunk(desk.enter(r, s), 5)) for s, r in enumerate((bad, good))]
    real = naive.model.logits

    def broken(hidden):
        z = real(hidden)
        z[0, 17] = float("nan")
        return z

    monkeypatch.setattr(naive.model, "logits", broken)
    out = desk.run(pairs)
    monkeypatch.undo()
    assert out.counts.tolist() == [0, 1] and bad.faults == [Fault.NAN]
    desk.finish([good])
    assert good.out == expected(naive, good)[0]


def test_the_recorder_sees_every_step(naive):
    class Recorder:
        seen, ended = [], 0

        def begin_step(self, plan, step):
            rows = zip(step.layout.slot.tolist(), step.batch.positions.tolist(), strict=True)
            self.seen.append((plan.step, list(rows)))

        def end_step(self):
            self.ended += 1

    runner, recorder = make_runner(naive), Recorder()
    request = Req(prompt(1, 3), 6, params={"temperature": 0.0})
    desk = Desk(runner)
    runner.trace(recorder)
    desk.enter(request, 2)
    desk.finish([request], chunk=2)
    assert recorder.seen == [
        (0, [(2, 0), (2, 1)]),
        (1, [(2, 2)]),
        (2, [(2, 3)]),
        (3, [(2, 4)]),
    ]
    assert recorder.ended == 4
    runner.trace(None)


def test_a_traced_step_runs_every_row(naive, monkeypatch):
    tails, real = [], naive.model.forward

    def forward(batch, *rest):
        tails.append(batch.tail is not None)
        return real(batch, *rest)

    monkeypatch.setattr(naive.model, "forward", forward)
    runner = make_runner(naive)
    for recorder in (SimpleNamespace(begin_step=lambda *_: None, end_step=lambda: None), None):
        runner.trace(recorder)
        desk, request = Desk(runner), Req(prompt(1, 9), 10)
        desk.enter(request, 2)
        desk.finish([request], chunk=9)
    assert tails == [False, True]
