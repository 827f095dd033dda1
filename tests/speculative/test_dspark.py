"""DSpark drafts: those of the text by itself, however the engine came to it."""

import json
from itertools import pairwise

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.api.speculative import DraftChoice
from deepinfer_speculative.costs import VERSION
from dspark_rig import BLOCK, Plain, Watched, pair, prompts, trained

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def drafted(request, tmp_path_factory):
    return pair(tmp_path_factory.mktemp("dspark"), request.param)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("learnt"))


def engine(target, draft, **more):
    same = {"draft_weights": "same"}  # as plain torch has it
    speculative = None if draft is None else {"model": str(draft), "mode": "static", **same}
    options = {"max_model_len": 128, "page_size": 4, "num_threads": 1, "batch_invariant": True}
    return LLM(str(target), speculative=speculative, **{**options, **more})


def ids(outputs):
    return [out.outputs[0].token_ids for out in outputs]


def agree(rounds, plain):
    """Every greedy draft is the best id of plain torch's logits, up to rounding."""
    assert rounds
    for text, drafts, sure in rounds:
        z, expected = plain.logits(text, [text[-1], *drafts[:-1]])
        mine = z.gather(1, torch.tensor(drafts)[:, None])[:, 0]
        assert (z.amax(1) - mine).max() < 1e-3
        assert torch.allclose(sure, expected, atol=1e-4)


def test_drafts_are_those_of_plain_torch(drafted, monkeypatch):
    watched = Watched(monkeypatch)
    with engine(*drafted) as llm:
        llm.generate(prompts(5), GREEDY)
    agree(watched.rounds, Plain(*drafted))


def test_chunks_hits_and_preemption_leave_the_same_drafts(learnt, monkeypatch):
    """Whatever wrote the context, drafts are those of the text; and some of them stand."""
    target, draft, _ = learnt
    watched = Watched(monkeypatch)
    shared = prompts(1, seed=9, length=40)[0] * 4
    asked = [[*shared, *tail] for tail in prompts(6, seed=3)]
    with engine(target, draft, max_num_batched_tokens=16, kv_cache_memory=160 << 10) as llm:
        outs = llm.generate(asked, GREEDY)
        outs += llm.generate(asked[:2], GREEDY)
    assert sum(out.metrics.preemptions for out in outs) > 0
    assert any(out.metrics.cached_tokens for out in outs)
    assert sum(out.metrics.accepted for out in outs) > 0
    agree(watched.rounds, Plain(target, draft))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_texts_are_those_without(learnt, dtype, rule):
    target, draft, _ = learnt
    asked = prompts(8, seed=5)
    with engine(target, None, dtype=dtype) as llm:
        alone = ids(llm.generate(asked, rule))
    with engine(target, draft, dtype=dtype) as llm:
        outs = llm.generate(asked, rule)
    assert ids(outs) == alone
    assert sum(out.metrics.accepted for out in outs) > 0


def test_training_lowers_the_loss_and_drafts_stand(learnt):
    target, draft, history = learnt
    assert history[-1]["l1"] < 0.8 * history[0]["l1"]
    with engine(target, draft) as llm:
        outs = llm.generate(prompts(48), GREEDY)
    rounds = sum(len(out.outputs[0].token_ids) - out.metrics.accepted for out in outs)
    assert sum(out.metrics.accepted for out in outs) / rounds > 0.3


def test_noise_is_shared_with_the_target(learnt):
    """Sampled drafts stand more often when they are drawn with the request's own noise."""
    target, draft, _ = learnt
    accepted = {}
    for how in ("coupled", "greedy"):
        options = {"model": str(draft), "mode": "static", "draft_sampling": how}
        with LLM(str(target), max_model_len=128, num_threads=1, speculative=options) as llm:
            asked = [SamplingParams(temperature=1.0, seed=i, max_tokens=32, ignore_eos=True)
                     for i in range(24)]  # fmt: skip
            outs = llm.generate(prompts(24, seed=5), asked)
        accepted[how] = sum(out.metrics.accepted for out in outs)
    assert accepted["coupled"] > accepted["greedy"]


@pytest.mark.parametrize("length", [1, BLOCK])
def test_shorter_drafts_are_the_first_rows(drafted, monkeypatch, length):
    target, draft = drafted
    watched = Watched(monkeypatch)
    options = {"model": str(draft), "mode": "static", "num_speculative_tokens": length}
    options["draft_weights"] = "same"
    with LLM(str(target), max_model_len=128, num_threads=1, speculative=options) as llm:
        llm.generate(prompts(2), GREEDY)
    assert {len(drafts) for _, drafts, _ in watched.rounds} == {length}
    plain = Plain(target, draft)
    for text, drafts, _ in watched.rounds[:4]:
        before = [text[-1], *drafts] + [3] * BLOCK
        z, _ = plain.logits(text, before[:BLOCK])
        assert z[:length].argmax(1).tolist() == drafts


def test_the_ratio_rule_draws_with_noise_of_its_own(learnt):
    target, draft, _ = learnt
    options = {"model": str(draft), "mode": "static", "acceptance": "ratio"}
    with LLM(str(target), max_model_len=128, num_threads=1, speculative=options) as llm:
        outs = llm.generate(prompts(8), HOT)
        greedy = llm.generate(prompts(8), GREEDY)
    assert sum(out.metrics.accepted for out in outs) > 0
    with engine(target, None, batch_invariant=False) as llm:
        assert ids(llm.generate(prompts(8), GREEDY)) == ids(greedy)


def test_drafts_that_nobody_verifies_are_not_made(learnt, monkeypatch, tmp_path):
    """Where only one draft pays, two are made: one more, to see whether it would."""
    target, draft, _ = learnt
    curve = {"sizes": [1, 2, 3, 6], "seconds": [1.0, 1.0, 9.0, 36.0], "tier_limit": 0}
    costs = tmp_path / "costs.json"
    free = {"sizes": [1], "seconds": [0.0]}
    costs.write_text(
        json.dumps({"version": VERSION, "plain": curve, "verify": curve, "draft": free})
    )
    asked = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    with engine(target, None) as llm:
        alone = ids(llm.generate(prompts(1), asked))
    watched = Watched(monkeypatch)
    options = {"model": str(draft), "costs": str(costs)}
    with LLM(str(target), max_model_len=128, num_threads=1, speculative=options) as llm:
        outs = llm.generate(prompts(1), asked)
    assert ids(outs) == alone
    assert outs[0].metrics.accepted > 0
    counts = [sum(drafts[2:]) for _, drafts, _ in watched.rounds]
    assert any(counts[:20]) and len(counts) > 45 and not any(counts[40:])


class Pausing:
    """A planner that lets nobody draft for 50 steps."""

    draft_len = BLOCK

    def __init__(self):
        self.steps, self.drafts = 0, False

    def choose(self, facts):
        self.steps += 1
        there, self.drafts = self.drafts, not 10 <= self.steps < 60
        rows = sum(min(r.most_drafts, BLOCK) for r in facts.decoding)
        return DraftChoice(min(rows, facts.room) if there else 0, propose=self.drafts)

    def observe(self, landed):
        pass


def test_drafts_after_a_pause_know_the_text_between(drafted, monkeypatch):
    target, draft = drafted
    watched = Watched(monkeypatch)
    asked = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with engine(target, draft) as llm:
        llm.assembly.engine.scheduler.planner = Pausing()
        llm.generate(prompts(2), asked)
    lengths = sorted({len(text) for text, _, _ in watched.rounds})
    assert max(b - a for a, b in pairwise(lengths)) > 30
    agree(watched.rounds, Plain(target, draft))
