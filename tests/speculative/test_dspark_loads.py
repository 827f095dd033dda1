"""A trained DSpark draft under the 300 random loads: ids and logprobs bit for bit."""

from dataclasses import replace

import bench_rig
import pytest
from bench_rig import same_texts
from deepinfer_speculative.dspark.drafter import DSparkDrafter
from dspark_rig import trained

FOLDER = []


class Learnt(DSparkDrafter):
    """The trained draft, whatever the configuration names."""

    def __init__(self, context, target):
        super().__init__(self.mine(context), target)

    @classmethod
    def needs(cls, context):
        return super().needs(cls.mine(context))

    @staticmethod
    def mine(context):
        how = "greedy" if context.options["seed"] % 4 == 3 else "coupled"
        some = 24 if context.options["seed"] % 5 == 4 else 0
        options = {"draft_sampling": how, "draft_candidates": some}
        return replace(context, model=str(FOLDER[-1]), options=options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    target, draft, _ = trained(tmp_path_factory.mktemp("learnt"))
    FOLDER.append(draft)
    bench_rig.Learnt = Learnt
    yield target
    del bench_rig.Learnt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "numbers",
    [range(8), pytest.param(range(8, 150), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_the_text_is_the_same(tiny, dtype, numbers):
    offset = 150 if dtype == "bfloat16" else 0
    same_texts(tiny, "Learnt", dtype, [number + offset for number in numbers])
