"""Drafts from hidden states, DSpark's and EAGLE-3's: those of the text by itself, however the
engine came to it; and texts are those without drafts.
"""

from types import SimpleNamespace

import dspark_rig
import eagle3_rig
import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer_speculative.dspark.drafter import DSparkDrafter
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter
from draft_rig import GREEDY, HOT, Watched, engine, ids, prompts

# As plain torch has it: DSpark on a CPU drafts with eight bits unless told.
KINDS = {
    "dspark": (dspark_rig, DSparkDrafter, {"draft_weights": "same"}),
    "eagle3": (eagle3_rig, Eagle3Drafter, {}),
}


@pytest.fixture(params=KINDS)
def learnt(request, learn):
    """``target``, ``draft``, ``how`` to draft as plain torch does, ``rig`` and ``drafter``."""
    target, draft, _ = learn(request.param)
    rig, drafter, how = KINDS[request.param]
    return SimpleNamespace(target=target, draft=draft, rig=rig, drafter=drafter, how=how)


def drafting(learnt, **how):
    """An engine as usual, batch variant."""
    options = {"model": str(learnt.draft), "mode": "static", **how}
    return LLM(str(learnt.target), max_model_len=128, num_threads=1, speculative=options)


def test_chunks_hits_and_preemption_leave_the_same_drafts(learnt, monkeypatch):
    """Whatever wrote the context, drafts are those of the text; and some of them stand."""
    watched = Watched(monkeypatch, learnt.drafter)
    shared = prompts(1, seed=9, length=40)[0] * 4
    asked = [[*shared, *tail] for tail in prompts(6, seed=3)]
    small = {"max_num_batched_tokens": 16, "kv_cache_memory": 160 << 10}
    with engine(learnt.target, learnt.draft, learnt.how, **small) as llm:
        outs = llm.generate(asked, GREEDY)
        # A hit that ends where texts part: the pair behind it is another one.
        outs += llm.generate([[*shared[:20], *tail] for tail in prompts(4, seed=4)], GREEDY)
        outs += llm.generate(asked[:2], GREEDY)
    assert sum(out.metrics.preemptions for out in outs) > 0
    assert sum(out.metrics.cached_tokens > 0 for out in outs[6:]) > 2
    assert sum(out.metrics.accepted for out in outs) > 0
    learnt.rig.agree(watched.rounds, learnt.rig.Plain(learnt.target, learnt.draft))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_are_those_without(learnt, dtype):
    asked = prompts(48)[:8]  # it knows these
    rules = {"greedy": GREEDY, "sampled": HOT}
    with engine(learnt.target, None, dtype=dtype) as llm:
        alone = {name: ids(llm.generate(asked, rule)) for name, rule in rules.items()}
    with engine(learnt.target, learnt.draft, learnt.how, dtype=dtype) as llm:
        outs = {name: llm.generate(asked, rule) for name, rule in rules.items()}
    for name in rules:
        assert ids(outs[name]) == alone[name], name
        assert sum(out.metrics.accepted for out in outs[name]) > 0, name


def test_what_was_learnt_stands(learnt):
    """Far above chance, which is 1/320 a draft."""
    with engine(learnt.target, learnt.draft, learnt.how) as llm:
        outs = llm.generate(prompts(48), GREEDY)
    rounds = sum(len(out.outputs[0].token_ids) - out.metrics.accepted for out in outs)
    assert sum(out.metrics.accepted for out in outs) / rounds > 0.3


def test_noise_is_shared_with_the_target(learnt):
    """Sampled drafts stand more often when they are drawn with the request's own noise."""
    accepted = {}
    asked = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=32, ignore_eos=True) for i in range(24)
    ]
    for how in ("coupled", "greedy"):
        with drafting(learnt, draft_sampling=how) as llm:
            outs = llm.generate(prompts(24, seed=5), asked)
        accepted[how] = sum(out.metrics.accepted for out in outs)
    assert accepted["coupled"] > accepted["greedy"]


def test_the_ratio_rule_draws_with_noise_of_its_own(learnt):
    with drafting(learnt, acceptance="ratio") as llm:
        outs = llm.generate(prompts(8), HOT)
        greedy = llm.generate(prompts(8), GREEDY)
    assert sum(out.metrics.accepted for out in outs) > 0
    with engine(learnt.target, None, batch_invariant=False) as llm:
        assert ids(llm.generate(prompts(8), GREEDY)) == ids(greedy)


def test_two_engines_share_nothing(learnt):
    with engine(learnt.target, learnt.draft) as one, engine(learnt.target, None) as other:
        asked = prompts(3, seed=8)
        assert ids(one.generate(asked, GREEDY)) == ids(other.generate(asked, GREEDY))
    assert torch.get_default_dtype() == torch.float32
