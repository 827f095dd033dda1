"""A trained EAGLE-3 head under random loads: ids and logprobs bit for bit."""

from dataclasses import replace

import bench_rig
import pytest
from bench_rig import same_texts
from deepinfer_speculative.eagle3.drafter import Eagle3Drafter
from eagle3_rig import trained

FOLDER = []


class Headed(Eagle3Drafter):
    """The trained head, whatever the configuration names."""

    def __init__(self, context, target):
        super().__init__(self.mine(context), target)

    @classmethod
    def needs(cls, context):
        return super().needs(cls.mine(context))

    @staticmethod
    def mine(context):
        how = "greedy" if context.options["seed"] % 4 == 3 else "coupled"
        return replace(context, model=str(FOLDER[-1]), options={"draft_sampling": how})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    target, head, _ = trained(tmp_path_factory.mktemp("learnt"))
    FOLDER.append(head)
    bench_rig.Headed = Headed
    yield target
    del bench_rig.Headed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "numbers",
    [range(8), pytest.param(range(8, 100), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_the_text_is_the_same(tiny, dtype, numbers):
    offset = 100 if dtype == "bfloat16" else 0
    same_texts(tiny, "Headed", dtype, [number + offset for number in numbers])
