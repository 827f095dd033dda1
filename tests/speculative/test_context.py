"""KV of a drafter in the target's pages: what it wrote of a text is what it finds again.

``ContextKeeper`` writes tapped rows into four layers of its own and reads, before each proposal,
all rows of the text back through the page table. Row p must be the same for every text that begins
with the same p + 1 tokens: cold, after chunks, hits, partial acceptance and preemption.
"""

import dataclasses

import pytest
import torch
from bench_rig import Bench, ContextKeeper, know
from deepinfer.api.kv import KVGroup, KVSpec
from deepinfer.api.speculative import DraftNeeds
from deepinfer.engine.logits import to_row_params
from deepinfer.errors import PluginError
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.scenarios import EOS
from deepinfer.worker.drafting import DraftPools, with_drafts
from load_rig import VOCAB, draw, tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "dtype, backend", [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "reference")]
)
def test_context_rows_survive_everything(tiny, dtype, backend):
    ContextKeeper.seen, ContextKeeper.reads = {}, 0
    preempted = cached = 0
    for number in range(6 if backend == "cpu" else 3):
        load = draw(number)
        requests = load.requests
        with Bench(tiny, dtype=dtype, reference=backend == "reference") as plain:
            right = plain.run(requests)
        know(requests, right)
        with Bench(
            tiny,
            drafter="ContextKeeper",
            seed=number,
            page_size=load.config["page_size"],
            pages=load.pages,
            max_num_batched_tokens=9 + number,
            dtype=dtype,
            reference=backend == "reference",
        ) as keeper:
            for turn in range(2):  # the second time prefixes are found
                again = [dataclasses.replace(r, id=f"{r.id} {turn}") for r in requests]
                got = keeper.run(again, arrivals=number)
                for r in requests:
                    assert got[f"{r.id} {turn}"].answer == right[r.id].answer
                preempted += sum(found.metrics.preemptions for found in got.values())
                cached += sum(found.metrics.cached_tokens for found in got.values())
    assert preempted and cached
    assert ContextKeeper.reads > 5 * len(ContextKeeper.seen) > 0


@pytest.mark.parametrize("cached", [True, False])
def test_a_planner_hears_of_prompts_without_what_is_found_of_them(tiny, cached):
    """What it hears of a step in which all enter is what that step runs."""
    heard, ran = [], []
    with Bench(tiny, drafter="Garbage", enable_prefix_caching=cached) as bench:
        prompts = [[3 + (7 * i + j) % 30 for j in range(33 + i)] for i in range(4)]
        first = draw(0).requests[0]
        for turn in range(2):
            for i, ids in enumerate(prompts):
                params = SamplingParams(temperature=0, max_tokens=4)
                row = to_row_params(params, len(ids), EOS, VOCAB, None)
                bench.engine.add(
                    dataclasses.replace(
                        first, id=f"{turn} {i}", token_ids=tuple(ids), limit=len(ids) + 4,
                        sampling=params, row_params=row, structured=None,
                    )
                )  # fmt: skip
            scheduler = bench.engine.scheduler
            choose, plan = scheduler.planner.choose, scheduler.plan
            scheduler.planner.choose = lambda facts, choose=choose: (
                heard.append((facts.prefill_tokens, facts.emitting)) or choose(facts)
            )

            def planned(plan=plan):
                found = plan()
                if found is not None:
                    chunks = found.rows.array[found.rows.array[:, 1] >= 0]
                    ran.append((int(chunks[:, 2].sum()), int(chunks[:, 3].sum())))
                return found

            scheduler.plan = planned
            heard.clear(), ran.clear()
            while bench.engine.has_work():
                bench.engine.step()
            scheduler.planner.choose, scheduler.plan = choose, plan
            assert heard[0] == ran[0]
    left = sum(len(ids) - 32 * cached for ids in prompts)
    assert heard[0] == (left, 4)


def test_memory_counts_the_drafters_layers(tiny):
    with Bench(tiny) as plain, Bench(tiny, drafter="ContextKeeper") as keeper:
        mine, more = plain.facts, keeper.facts
        extra = 2 * 2 * 64 * 4
        assert more.kv.bytes_per_token == mine.kv.bytes_per_token + extra
        assert more.kv.layout == f"{mine.kv.layout}+test-context"
        assert more.kv.groups[-1].layers == (3, 4)
        assert more.num_pages < mine.num_pages
        assert keeper.executor.call("memory")[0]["kv"] <= 64 << 20


def test_groups_of_one_name_are_refused():
    group = KVGroup(name="full", kind="full", layers=(0,), head_dim=2, bytes_per_token=16)
    spec = KVSpec((group,), "x")
    with pytest.raises(PluginError, match="'full'"):
        with_drafts(spec, DraftNeeds(draft_len=1, kv=spec))
    assert with_drafts(spec, DraftNeeds(draft_len=1)) is spec


def test_a_drafter_sees_its_layers_by_its_own_numbers():
    class Pool:
        def layer(self, index):
            return index, torch.zeros(1)

        def tensor(self, group, layer):
            return group, layer

    pools = DraftPools(Pool(), 7)
    assert pools.layer(1)[0] == 8 and pools.tensor("state", 0) == ("state", 7)
