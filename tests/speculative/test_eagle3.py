"""What EAGLE-3 heads of each kind draft; test_drafts.py has what DSpark does as well."""

import pytest
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter
from draft_rig import GREEDY, HOT, Watched, engine, prompts
from eagle3_rig import Plain, agree, pair

KINDS = {
    "llama": {},
    "whole": {"vocab": 320},
    "llama3": {"norm_before_residual": True},
    "qwen3": {"norms": True, "speculators": True},
    "3.1": {"norm_before_fc": True, "norm_output": True, "speculators": True},
}


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
    with engine(target, head, {"num_speculative_tokens": length}) as llm:
        llm.generate(prompts(2), GREEDY)
    assert {len(drafts) for _, drafts, _ in watched.rounds} == {length}
    agree(watched.rounds, Plain(target, head))


def test_ids_outside_the_draft_vocabulary_are_never_drafted(tmp_path, monkeypatch):
    target, head = pair(tmp_path, vocab=20)
    allowed = set(Plain(target, head).ids.tolist())
    watched = Watched(monkeypatch, Eagle3Drafter)
    with engine(target, head) as llm:
        llm.generate(prompts(4), [GREEDY, HOT, GREEDY, HOT])
    drafted = {draft for _, drafts, _ in watched.rounds for draft in drafts}
    assert len(drafted) > 1 and drafted <= allowed
    assert all(bool(((sure > 0) & (sure <= 1)).all()) for _, _, sure in watched.rounds)


def test_a_head_learns(learn):
    """In plain torch; how its drafts do in an engine is in test_drafts.py."""
    hits = learn("eagle3")[2]
    assert hits[-1] > 0.3 > 0.05 > hits[0]
