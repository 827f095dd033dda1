"""Logprobs: the model's raw distribution, against a full recompute."""

import pytest
import torch
from deepinfer.worker import runner as runner_module
from rig import Desk, Req, expected, load, make_runner
from test_drafts import setup
from test_runner import prompt


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"))


def check(entry, raw, token, wanted):
    """One token's (ids, values, rank) against its distribution float64[V]."""
    ids, values, rank = entry
    best = torch.sort(raw, descending=True, stable=True)
    assert ids[0] == token and values[0] == pytest.approx(float(raw[token]), abs=1e-5)
    assert rank == best.indices.tolist().index(token) + 1
    assert ids[1 : 1 + wanted] == best.indices[:wanted].tolist()
    assert values[1 : 1 + wanted] == pytest.approx(best.values[:wanted].tolist(), abs=1e-5)
    assert set(ids[1 + wanted :]) <= {-1}


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside-others"])
def test_emitted_tokens(naive, others):
    """Raw: neither bias, penalty nor temperature shows in them."""
    shaping = {"temperature": 0.7, "logit_bias": ((9, 5.0),), "frequency_penalty": 0.5}
    requests = [
        Req(prompt(1, 5), 12, seed=4, params={**shaping, "logprobs": 3}),
        Req(prompt(2, 3), 9, params={"temperature": 0.0, "logprobs": 0}),
        Req(prompt(3, 7), 14, params={"temperature": 1.0}),
    ][: 3 if others else 1]
    desk = Desk(make_runner(naive))
    for slot, request in enumerate(requests):
        desk.enter(request, slot)
    desk.finish(requests)
    for request in requests:
        ids, raw = expected(naive, request)
        wanted = request.params.get("logprobs", -1)
        assert request.out == ids
        assert len(request.logprobs) == (len(ids) if wanted >= 0 else 0)
        for entry, distribution, token in zip(request.logprobs, raw, ids, strict=False):
            check(entry, distribution, token, wanted)


def test_emitted_tokens_with_drafts(naive):
    requests = [
        Req(prompt(1, 5), 16, seed=4, params={"temperature": 0.8, "logprobs": 2}),
        Req(prompt(2, 3), 15, params={"temperature": 0.0}),
        Req(prompt(3, 4), 15, params={"temperature": 0.0, "logprobs": 1, "min_len": 9}),
    ]
    desk, _ = setup(naive, requests, 3, 0.7)
    desk.finish(requests)
    for request in requests:
        ids, raw = expected(naive, request)
        wanted = request.params.get("logprobs", -1)
        assert request.out == ids
        assert len(request.logprobs) == (len(ids) if wanted >= 0 else 0)
        for entry, distribution, token in zip(request.logprobs, raw, ids, strict=False):
            check(entry, distribution, token, wanted)


def test_the_whole_vocabulary(naive):
    request = Req(prompt(1, 5), 7, params={"temperature": 0.0, "logprobs": 320})
    desk = Desk(make_runner(naive))
    desk.enter(request, 0)
    desk.finish([request])
    ids, raw = expected(naive, request)
    for entry, distribution, token in zip(request.logprobs, raw, ids, strict=True):
        check(entry, distribution, token, 320)


def test_masked_rows_report_the_raw_distribution(naive):
    request = Req(
        prompt(1, 5), 9, params={"temperature": 0.0, "logprobs": 2}, allowed=lambda text: [40, 41]
    )
    desk = Desk(make_runner(naive))
    desk.enter(request, 0)
    desk.finish([request])
    ids, raw = expected(naive, request)
    assert set(ids) <= {40, 41}
    for entry, distribution, token in zip(request.logprobs, raw, ids, strict=True):
        check(entry, distribution, token, 2)


@pytest.mark.parametrize("tile", [1 << 26, 4 * 320 * 3], ids=["one-tile", "tiles-of-3"])
@pytest.mark.parametrize("gamma", [0, 2])
def test_prompt_tokens_over_chunk_borders(naive, tile, gamma, monkeypatch):
    monkeypatch.setattr(runner_module, "_TILE_BYTES", tile)
    requests = [
        Req(prompt(1, 17), 19, params={"temperature": 0.0, "prompt_logprobs": 2}),
        Req(prompt(2, 4), 14, params={"temperature": 0.0}),
        Req(prompt(3, 1), 4, params={"temperature": 0.0, "prompt_logprobs": 1}),
        Req(prompt(4, 2), 4, params={"temperature": 0.0, "prompt_logprobs": 0, "logprobs": 1}),
    ]
    desk, _ = setup(naive, requests, gamma, 0.5)
    late = requests[0]
    desk.new.remove(next(a for a in desk.new if a.slot == late.slot))
    desk.finish(requests[1:2], chunk=2)  # decodes stand beside the chunks
    desk.enter(late, late.slot)
    desk.finish(requests)
    for request in requests:
        wanted = request.params.get("prompt_logprobs", -1)
        raw = torch.log_softmax(naive.logits(request.prompt).double(), 1)
        got = request.prompt_logprobs
        assert [g[0] for g in got] == (list(range(1, len(request.prompt))) if wanted >= 0 else [])
        for position, *entry in got:
            check(entry, raw[position - 1], request.prompt[position], wanted)
        assert request.out == expected(naive, request)[0]
