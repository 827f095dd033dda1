"""Steps that run whole, as a device with graphs runs them, with drafts: texts and drafts alike."""

import json

import pytest
import torch
from deepinfer import SamplingParams
from deepinfer.worker import recorded
from deepinfer.worker.runner import ModelRunner
from deepinfer_speculative.dspark import drafter as dspark
from deepinfer_speculative.dspark.base import BlockDrafter, StateDrafter
from deepinfer_speculative.dspark.drafter import DSparkDrafter
from draft_rig import Watched, engine, ids, prompts
from dspark_rig import Moody, pair

PARAMS = [
    SamplingParams(
        temperature=0.9 * (i % 2), seed=i, max_tokens=8 + 5 * i, top_k=3 * (i % 4 == 3),
        ignore_eos=True,
    )
    for i in range(7)
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("greedy", [False, True])
def test_drafts_are_those_of_steps_in_halves(tmp_path, monkeypatch, recording, family, greedy):
    """For any mix of requests, whose number changes as they end."""
    found, counts = [], None
    params = PARAMS[::2] if greedy else PARAMS
    for _ in range(2):
        with monkeypatch.context() as patch:
            watched = Watched(patch)
            with engine(*pair(tmp_path, family), {"mode": "static"}, max_num_seqs=7) as llm:
                texts = ids(llm.generate(prompts(len(params)), params))
        found.append((texts, sorted((text, drafts) for text, drafts, _ in watched.rounds)))
        counts = counts or recording()
    assert found[0] == found[1] and counts["replays"] > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", [{"mode": "static"}, {"mode": "cap"}, {"mode": "adaptive"}])
@pytest.mark.parametrize("deep", [False, True], ids=["one ahead", "two ahead"])
def test_texts_are_those_without_drafts(learn, recording, how, dtype, deep):
    target, draft, _ = learn("dspark")
    more = {"dtype": dtype, "max_num_seqs": 5}
    with engine(target, None, **more) as llm:
        want = ids(llm.generate(prompts(7), PARAMS))
    counts = recording(deep)
    with engine(target, draft, how, **more) as llm:
        for _ in range(2):  # prefixes are found the second time
            outs = llm.generate(prompts(7), PARAMS)
            assert ids(outs) == want
    assert counts["replays"] > 10 or how["mode"] == "cap"
    assert sum(out.metrics.accepted for out in outs) > 10 or how["mode"] != "static"


@pytest.mark.parametrize("most", [256, 48])
def test_the_context_of_a_pause_is_there_when_drafting_comes_back(
    learn, tmp_path, monkeypatch, recording, most
):
    """Rows that a graph has put aside are those that would have been written at once, whether the
    draft that asks for them writes them or, when there are many, a graph does.
    """
    target, draft, _ = learn("dspark")
    curve = {"sizes": [1], "seconds": [1.0], "tier_limit": 0}
    table = {"version": 3, "plain": curve, "verify": curve, "draft": {**curve, "seconds": [1e4]}}
    (tmp_path / "costs.json").write_text(json.dumps(table))
    how = {"mode": "adaptive", "costs": str(tmp_path / "costs.json")}
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)

    def rounds(recorded):
        counts = recording() if recorded else None
        with monkeypatch.context() as patch:
            patch.setattr(dspark, "MANY", most if recorded else 10_000)
            watched = Watched(patch)
            with engine(target, draft, how, max_num_seqs=5) as llm:
                planner = llm.assembly.engine.scheduler.planner
                right, asked = planner.choose, []

                def choose(facts):
                    asked.append(facts)
                    choice = right(facts)
                    # A pause, and behind every twentieth step drafts, whatever they cost.
                    return choice._replace(rows=0, propose=len(asked) % 20 == 0, hold=0)

                patch.setattr(planner, "choose", choose)
                texts = ids(llm.generate(prompts(5), params))
                drafter = llm.assembly.engine.executor._host.runner._rig.drafter
                assert (drafter._write_all is not None) == (recorded and most == 48)
        return texts, sorted((text, drafts) for text, drafts, _ in watched.rounds), counts

    texts, drafts, _ = rounds(recorded=False)
    again, same, counts = rounds(recorded=True)
    assert again == texts and same == drafts and len(drafts) > 10
    assert counts["replays"] > 40


def test_of_a_pause_prompts_and_what_was_decoded_last_have_context(learn, monkeypatch):
    """On a CPU; older rows of what was decoded are zero, never those of another text."""
    target, draft, _ = learn("dspark")

    write, ran = DSparkDrafter.write, []

    def watch(drafter, taps, slots, kv):
        some = taps.slot_of_token[slots >= 0].tolist()
        alone = [some.count(request) == 1 for request in some]
        ran.extend(zip(slots[slots >= 0].tolist(), alone, strict=True))
        write(drafter, taps, slots, kv)

    monkeypatch.setattr(DSparkDrafter, "write", watch)

    def context(most):
        monkeypatch.setattr(dspark, "MANY", most)
        with engine(target, draft, {"mode": "adaptive"}, max_num_seqs=4) as llm:
            planner = llm.assembly.engine.scheduler.planner
            right = planner.choose
            planner.choose = lambda facts: right(facts)._replace(rows=0, propose=False, hold=0)
            ran.clear()
            params = [SamplingParams(temperature=0, max_tokens=20 + i) for i in range(9)]
            llm.generate(prompts(9), params)
            drafter = llm.assembly.engine.executor._host.runner._rig.drafter._made
            with torch.inference_mode():
                drafter.settle(drafter._kv)
            layers = range(drafter.config.shape.layers)
            pools = [pool.flatten(0, 1).flatten(1) for i in layers for pool in drafter._kv.layer(i)]
            return torch.cat(pools, 1), dict(ran), [slot for slot, alone in ran if alone]

    full, wrote, order = context(10_000)
    some, again, _ = context(48)
    assert wrote == again and len(order) > 150
    prompt = [slot for slot, alone in wrote.items() if not alone]
    assert len(prompt) > 20 and full[prompt].any(1).all()
    there = torch.isclose(some, full, atol=1e-6).all(1)
    assert there[prompt].all() and there[order[-20:]].all()
    decoded = torch.tensor([slot for slot, alone in wrote.items() if alone])
    gone = decoded[~there[decoded]]
    assert len(gone) > len(decoded) / 2 and not some[gone].any()


@pytest.mark.parametrize("dtype, most", [("float32", 256), ("bfloat16", 6), ("float32", 24)])
def test_a_graph_needs_nothing_of_the_host(learn, monkeypatch, freezing, caplog, dtype, most):
    """Replays run no Python; whether rows wait when a graph is recorded is of no step's concern.

    ``most``: rows that may wait, more than those of a step and fewer, and so many that they are
    written many at a time, which is a graph of its own.
    """
    target, draft, _ = learn("dspark")
    more = {"dtype": dtype, "max_num_seqs": 5, "backend": "reference", "kv_cache_memory": "2MiB"}
    monkeypatch.setattr(dspark, "MANY", most)
    with engine(target, None, **more) as llm:
        want = ids(llm.generate(prompts(7), PARAMS))
    counts = freezing()
    monkeypatch.setattr(recorded, "WISHED", 150)  # a graph takes the tape a second
    monkeypatch.setattr(BlockDrafter, "allot", StateDrafter.allot)  # a GPU's: it looks at nothing
    with engine(target, draft, **more) as llm:
        runner = llm.assembly.engine.executor._host.runner
        planner = llm.assembly.engine.scheduler.planner = Moody()
        waiting, right, steps = runner._rig.drafter._waiting, ModelRunner.sample, []

        def sample(runner, *args):
            answer = right(runner, *args)
            steps.append(int(waiting._end) == waiting.count)
            return answer

        monkeypatch.setattr(ModelRunner, "sample", sample)  # on the thread that moves both
        outs = [llm.generate(prompts(7), PARAMS) for _ in range(2)]
        written = runner._rig.drafter._write_all
    assert all(ids(some) == want for some in outs)
    assert (most != 24) or written is not None
    assert all(steps) and len(steps) > 40, "a graph puts rows behind those that wait"
    assert counts["recorded"] > 6 and counts["replays"] > 40 and not caplog.messages
    assert planner.pauses > 4 and sum(out.metrics.accepted for some in outs for out in some) > 5


def test_graphs_that_only_measuring_needs_are_given_back(learn, tmp_path, monkeypatch, recording):
    """Nobody verifies drafts and wants none behind them; the table knows every stair."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recording()
    target, draft, _ = learn("dspark")
    how = {"mode": "adaptive", "profile_seconds": 60.0}
    with engine(target, draft, how, max_num_seqs=4) as llm:
        host = llm.assembly.engine.executor._host
        kinds = host.runner._recorded._graphs()
        gamma = host.facts.draft_len
        assert {(kind.rows, kind.draft_rows) for kind in kinds if kind.propose} == {
            (n, n * gamma) for n in (1, 2, 4)
        }
        assert all(kind.propose or not kind.draft_rows for kind in kinds)
        table = llm.assembly.engine.scheduler.planner._table
        assert table.graph_rows == host.runner.graph_rows == recorded.MOST_ROWS_LIGHT
        assert {4 * k for k in range(2, gamma + 2)} <= set(table.verify.sizes)
