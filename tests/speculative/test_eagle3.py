"""EAGLE-3 drafts: those of the text by itself, however the engine came to it."""

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter
from dspark_rig import Watched
from eagle3_rig import Plain, agree, pair, prompts, trained

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
KINDS = {
    "llama": {},
    "whole": {"vocab": 320},
    "llama3": {"norm_before_residual": True},
    "qwen3": {"norms": True, "speculators": True},
    "3.1": {"norm_before_fc": True, "norm_output": True, "speculators": True},
}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("learnt"))


def engine(target, draft, **more):
    speculative = None if draft is None else {"model": str(draft), "mode": "static"}
    options = {"max_model_len": 128, "page_size": 4, "num_threads": 1, "batch_invariant": True}
    return LLM(str(target), speculative=speculative, **{**options, **more})


def ids(outputs):
    return [out.outputs[0].token_ids for out in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_plain_torch(kind, tmp_path, monkeypatch):
    family = kind if kind in ("llama3", "qwen3") else "llama"
    target, head = pair(tmp_path, family, **KINDS[kind])
    watched = Watched(monkeypatch, Eagle3Drafter)
    with engine(target, head) as llm:
        llm.generate([*prompts(5), [7]], GREEDY)
    assert {len(drafts) for _, drafts, _ in watched.rounds} == {3}
    agree(watched.rounds, Plain(target, head))


@pytest.mark.parametrize("length", [1, 7])
def test_any_length_is_drafted(length, tmp_path, monkeypatch):
    """More than a page of four holds, too."""
    target, head = pair(tmp_path)
    watched = Watched(monkeypatch, Eagle3Drafter)
    options = {"model": str(head), "mode": "static", "num_speculative_tokens": length}
    with LLM(str(target), max_model_len=64, page_size=4, speculative=options) as llm:
        llm.generate(prompts(2), GREEDY)
    assert {len(drafts) for _, drafts, _ in watched.rounds} == {length}
    agree(watched.rounds, Plain(target, head))


def test_chunks_hits_and_preemption_leave_the_same_drafts(learnt, monkeypatch):
    """Whatever wrote the context, drafts are those of the text; and some of them stand."""
    target, head, _ = learnt
    watched = Watched(monkeypatch, Eagle3Drafter)
    shared = prompts(1, seed=9, length=40)[0] * 4
    asked = [[*shared, *tail] for tail in prompts(6, seed=3)]
    with engine(target, head, max_num_batched_tokens=16, kv_cache_memory=160 << 10) as llm:
        outs = llm.generate(asked, GREEDY)
        # A hit that ends where texts part: the pair behind it is another one.
        outs += llm.generate([[*shared[:20], *tail] for tail in prompts(4, seed=4)], GREEDY)
        outs += llm.generate(asked[:2], GREEDY)
    assert sum(out.metrics.preemptions for out in outs) > 0
    assert sum(out.metrics.cached_tokens > 0 for out in outs[6:]) > 2
    assert sum(out.metrics.accepted for out in outs) > 0
    agree(watched.rounds, Plain(target, head))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_texts_are_those_without(learnt, dtype, rule):
    target, head, _ = learnt
    asked = prompts(48)[:8]  # it knows these
    with engine(target, None, dtype=dtype) as llm:
        alone = ids(llm.generate(asked, rule))
    with engine(target, head, dtype=dtype) as llm:
        outs = llm.generate(asked, rule)
    assert ids(outs) == alone
    assert sum(out.metrics.accepted for out in outs) > 0


def test_what_was_learnt_stands(learnt):
    """Far above chance, which is 1/320 a draft, and above what it began with."""
    target, head, hits = learnt
    assert hits[-1] > 0.3 > 0.05 > hits[0]
    with engine(target, head) as llm:
        outs = llm.generate(prompts(48), GREEDY)
    rounds = sum(len(out.outputs[0].token_ids) - out.metrics.accepted for out in outs)
    assert sum(out.metrics.accepted for out in outs) / rounds > 0.3


def test_noise_is_shared_with_the_target(learnt):
    """Sampled drafts stand more often when they are drawn with the request's own noise."""
    target, head, _ = learnt
    accepted = {}
    for how in ("coupled", "greedy"):
        options = {"model": str(head), "mode": "static", "draft_sampling": how}
        with LLM(str(target), max_model_len=128, num_threads=1, speculative=options) as llm:
            asked = [SamplingParams(temperature=1.0, seed=i, max_tokens=32, ignore_eos=True)
                     for i in range(24)]  # fmt: skip
            outs = llm.generate(prompts(24, seed=5), asked)
        accepted[how] = sum(out.metrics.accepted for out in outs)
    assert accepted["coupled"] > accepted["greedy"]


def test_the_ratio_rule_draws_with_noise_of_its_own(learnt):
    target, head, _ = learnt
    options = {"model": str(head), "mode": "static", "acceptance": "ratio"}
    with LLM(str(target), max_model_len=128, num_threads=1, speculative=options) as llm:
        outs = llm.generate(prompts(8), HOT)
        greedy = llm.generate(prompts(8), GREEDY)
    assert sum(out.metrics.accepted for out in outs) > 0
    with engine(target, None, batch_invariant=False) as llm:
        assert ids(llm.generate(prompts(8), GREEDY)) == ids(greedy)


def test_ids_outside_the_draft_vocabulary_are_never_drafted(tmp_path, monkeypatch):
    target, head = pair(tmp_path, vocab=20)
    allowed = set(Plain(target, head).ids.tolist())
    watched = Watched(monkeypatch, Eagle3Drafter)
    with engine(target, head) as llm:
        llm.generate(prompts(4), [GREEDY, HOT, GREEDY, HOT])
    drafted = {draft for _, drafts, _ in watched.rounds for draft in drafts}
    assert len(drafted) > 1 and drafted <= allowed
    assert all(bool(((sure > 0) & (sure <= 1)).all()) for _, _, sure in watched.rounds)


def test_two_engines_share_nothing(learnt):
    target, head, _ = learnt
    with engine(target, head) as one, engine(target, None) as other:
        asked = prompts(3, seed=8)
        assert ids(one.generate(asked, GREEDY)) == ids(other.generate(asked, GREEDY))
    assert torch.get_default_dtype() == torch.float32
