"""What DSpark alone does; test_drafts.py has what EAGLE-3 does as well."""

import json
from itertools import pairwise

import pytest
from deepinfer import LLM, SamplingParams
from deepinfer.api.speculative import DraftChoice
from deepinfer_speculative.costs import VERSION
from deepinfer_speculative.pace import Pace
from draft_rig import GREEDY, Watched, engine, ids, prompts
from dspark_rig import BLOCK, Plain, agree, pair

SAME = {"draft_weights": "same"}  # as plain torch has it


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def drafted(request, tmp_path_factory):
    return pair(tmp_path_factory.mktemp("dspark"), request.param)


def test_drafts_are_those_of_plain_torch(drafted, monkeypatch):
    watched = Watched(monkeypatch)
    with engine(*drafted, SAME) as llm:
        llm.generate(prompts(5), GREEDY)
    agree(watched.rounds, Plain(*drafted))


def test_training_lowered_the_loss(learn):
    history = learn("dspark")[2]
    assert history[-1]["l1"] < 0.8 * history[0]["l1"]


@pytest.mark.parametrize("length", [1, BLOCK])
def test_shorter_drafts_are_the_first_rows(drafted, monkeypatch, length):
    target, draft = drafted
    watched = Watched(monkeypatch)
    with engine(target, draft, {**SAME, "num_speculative_tokens": length}) as llm:
        llm.generate(prompts(2), GREEDY)
    assert {len(drafts) for _, drafts, _ in watched.rounds} == {length}
    plain = Plain(target, draft)
    for text, drafts, _ in watched.rounds[:4]:
        before = [text[-1], *drafts] + [3] * BLOCK
        z, _ = plain.logits(text, before[:BLOCK])
        assert z[:length].argmax(1).tolist() == drafts


def test_drafts_that_nobody_verifies_are_not_made(learn, monkeypatch, tmp_path):
    """Where only one draft pays, two are made: one more, to see whether it would."""
    target, draft, _ = learn("dspark")
    curve = {"sizes": [3, 6, 9, 18], "seconds": [1.0, 1.0, 9.0, 36.0], "tier_limit": 0}
    costs = tmp_path / "costs.json"
    free = {"sizes": [1], "seconds": [0.0]}
    costs.write_text(
        json.dumps({"version": VERSION, "plain": curve, "verify": curve, "draft": free})
    )
    asked = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    with engine(target, None) as llm:
        alone = ids(llm.generate(prompts(3), asked))
    watched = Watched(monkeypatch)
    monkeypatch.setattr(Pace, "compared", True)  # this table is of no machine
    options = {"model": str(draft), "costs": str(costs)}
    with LLM(str(target), max_model_len=128, num_threads=1, speculative=options) as llm:
        outs = llm.generate(prompts(3), asked)
    assert ids(outs) == alone
    assert sum(out.metrics.accepted for out in outs) > 0
    counts = [sum(drafts[2:]) for _, drafts, _ in watched.rounds]
    assert any(counts[:60]) and len(counts) > 200
    assert not any(counts[120:200]), "the last requests may have all heads"


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
    with engine(target, draft, SAME) as llm:
        llm.assembly.engine.scheduler.planner = Pausing()
        llm.generate(prompts(2), asked)
    lengths = sorted({len(text) for text, _, _ in watched.rounds})
    assert max(b - a for a, b in pairwise(lengths)) > 30
    agree(watched.rounds, Plain(target, draft))
