"""Trained drafts from hidden states under random loads: ids and logprobs bit for bit."""

from dataclasses import replace

import bench_rig
import pytest
from bench_rig import same_texts
from deepinfer_speculative.dspark.drafter import DSparkDrafter
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter


def trained(kind, draft, most_candidates=0):
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
def dspark(learn, monkeypatch):
    target, draft, _ = learn("dspark")
    monkeypatch.setattr(bench_rig, "Learnt", trained(DSparkDrafter, draft, 24), raising=False)
    return target


@pytest.fixture
def eagle3(learn, monkeypatch):
    target, head, _ = learn("eagle3")
    monkeypatch.setattr(bench_rig, "Learnt", trained(Eagle3Drafter, head), raising=False)
    return target


def loads(few, many):
    """Numbers of loads by dtype: the first half of ``many`` in float32, the rest in bfloat16."""
    half, found = many // 2, []
    for dtype, offset in (("float32", 0), ("bfloat16", half)):
        found.append(pytest.param(dtype, range(offset, offset + few), id=f"few-{dtype}"))
        rest = range(offset + few, offset + half)
        found.append(pytest.param(dtype, rest, id=f"many-{dtype}", marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize("dtype, numbers", loads(8, 300))
def test_dspark(dspark, dtype, numbers):
    same_texts(dspark, "Learnt", dtype, numbers)


@pytest.mark.parametrize("dtype, numbers", loads(8, 200))
def test_eagle3(eagle3, dtype, numbers):
    same_texts(eagle3, "Learnt", dtype, numbers)
