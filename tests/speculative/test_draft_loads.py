"""Trained drafts from hidden states under random loads: ids and logprobs bit for bit."""

from dataclasses import replace

import bench_rig
import dspark_rig
import eagle3_rig
import pytest
from deepinfer_speculative.dspark.drafter import DSparkDrafter
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter
from draft_rig import answered
from load_rig import VOCAB, draw, same_texts, tiny_model


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """``taught("dspark")``, ``taught("eagle3")``: (a calm target, a draft that has learnt it)."""
    folder, found = tmp_path_factory.mktemp("taught"), {}
    target = tiny_model(folder / "target", calm=True)

    def once(kind):
        if kind not in found:
            given = {"target": target, "answers": answered(target, 64, VOCAB, hot=True)}
            if kind == "dspark":
                _, found[kind], _ = dspark_rig.trained(folder / kind, steps=40, **given)
            else:  # a few ids are never drafted
                _, found[kind], _ = eagle3_rig.trained(folder / kind, steps=60, vocab=30, **given)
        return target, found[kind]

    return once


def learnt(kind, draft, most_candidates=0):
    """``kind`` with the trained draft, whatever the configuration names."""

    class Learnt(kind):
        def __init__(self, context, target):
            super().__init__(self.mine(context), target)

        @classmethod
        def needs(cls, context):
            return super().needs(cls.mine(context))

        @staticmethod
        def mine(context):
            seed = context.options["seed"]
            options = {"draft_sampling": "greedy" if seed % 4 == 3 else "coupled"}
            if most_candidates:
                options["draft_candidates"] = most_candidates if seed % 5 == 4 else 0
            return replace(context, model=str(draft), options=options)

    return Learnt


@pytest.fixture
def dspark(taught, monkeypatch):
    target, draft = taught("dspark")
    monkeypatch.setattr(bench_rig, "Learnt", learnt(DSparkDrafter, draft, 24), raising=False)
    return target


@pytest.fixture
def eagle3(taught, monkeypatch):
    target, head = taught("eagle3")
    monkeypatch.setattr(bench_rig, "Learnt", learnt(Eagle3Drafter, head), raising=False)
    return target


def numbers(few, many):
    """Numbers of loads by dtype: the first half of ``many`` in float32, the rest in bfloat16."""
    half, found = many // 2, []
    for dtype, offset in (("float32", 0), ("bfloat16", half)):
        found.append(pytest.param(dtype, range(offset, offset + few), id=f"few-{dtype}"))
        rest = range(offset + few, offset + half)
        found.append(pytest.param(dtype, rest, id=f"many-{dtype}", marks=pytest.mark.slow))
    return found


def check(target, dtype, numbers):
    """Texts are the same, and drafts were good enough to show what happens when they stand."""
    loads = [draw(number, ("Learnt",)) for number in numbers]
    tally = same_texts(target, dtype, loads)
    assert tally["verified"] > 20 * len(loads), tally
    assert tally.share("accepted", "verified") > 0.2, tally
    assert tally.share("loads that accepted", "loads") > 0.6, tally
    assert tally["accepted grammar"] > 0 and tally["Learnt together"] > len(loads), tally
    assert tally.share("loads that preempted", "loads") > 0.2, tally


@pytest.mark.parametrize("dtype, numbers", numbers(8, 300))
def test_dspark(dspark, dtype, numbers):
    check(dspark, dtype, numbers)


@pytest.mark.parametrize("dtype, numbers", numbers(8, 200))
def test_eagle3(eagle3, dtype, numbers):
    check(eagle3, dtype, numbers)
