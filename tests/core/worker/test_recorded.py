"""Steps that run whole, as a device with graphs runs them, say what steps in halves say."""

import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.api.speculative import StepShape
from deepinfer.errors import EngineDeadError
from deepinfer.testing.tiny import write_tiny_checkpoint
from deepinfer.worker import recorded
from deepinfer.worker.recorded import RecordedSteps, draft_tier, tier
from deepinfer.worker.runner import ModelRunner

SIZES = {"max_model_len": 96, "page_size": 4, "num_threads": 1, "batch_invariant": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("model")))


def asked(count, **more):
    """Prompts and parameters of every kind of row, which end at different lengths."""
    prompts = [{"prompt_token_ids": list(range(5 + i, 9 + 3 * i))} for i in range(count)]
    kinds = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.2, "seed": 4, "top_k": 7, "min_p": 0.01},
        {"temperature": 0.7, "seed": 5, "top_p": 0.8},
    ]
    params = [
        SamplingParams(**kinds[i % 4], max_tokens=6 + 5 * (i % 5), ignore_eos=i % 2 == 0, **more)
        for i in range(count)
    ]
    return prompts, params


def said(model, prompts, params, **more):
    with LLM(model, **{**SIZES, "max_num_seqs": 9, **more}) as llm:
        outs = llm.generate(prompts, params)
        return [(o.outputs[0].token_ids, o.outputs[0].finish_reason, o.error) for o in outs]


@pytest.mark.parametrize("deep", [False, True], ids=["one ahead", "two ahead"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_texts_are_those_of_steps_in_halves(model, recording, backend, deep):
    """Rows come and go, so tiers are filled up, and prompts come between."""
    want = said(model, *asked(23), backend=backend)
    counts = recording(deep)
    assert said(model, *asked(23), backend=backend) == want
    assert counts["replays"] > 15 > counts["recorded"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_needs_nothing_of_the_host(model, freezing, caplog, dtype):
    """Replays run no Python: what changes from step to step lies on the device."""
    how = {"backend": "reference", "dtype": dtype, "kv_cache_memory": "2MiB"}
    want = said(model, *asked(13), **how)
    counts = freezing()
    assert said(model, *asked(13), **how) == want
    assert counts["recorded"] > 1 and counts["replays"] > 15 and not caplog.messages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [2048, 23], ids=["whole", "in chunks"])
def test_prompts_end_in_graphs(model, freezing, monkeypatch, caplog, dtype, budget):
    """Alone and beside rows that decode, found in the cache or not, the last chunk of several."""
    how = {"backend": "reference", "dtype": dtype, "kv_cache_memory": "2MiB"}
    how |= {"max_num_batched_tokens": budget, "max_num_seqs": 9}
    monkeypatch.setattr(recorded, "MORE", (4, 16, 64, 256))

    def rounds():
        with LLM(model, **SIZES, **how) as llm:
            steps = llm.assembly.engine.executor._host.runner._recorded
            texts = [
                [out.outputs[0].token_ids for out in llm.generate(*asked(count))]
                for count in (1, 13, 1, 13, 2)
            ]
            return texts, [k for k, stage in steps._stages.items() if stage.replay is not None]

    want, _ = rounds()
    freezing()
    texts, kinds = rounds()
    assert texts == want and not caplog.messages
    ends = [kind for kind in kinds if kind.more]
    assert {kind.rows for kind in ends} > {1} and len({kind.more for kind in ends}) > 1


@pytest.mark.parametrize("light", [True, False])
def test_of_a_light_model_waves_of_prompts_are_graphs_too(model, recording, monkeypatch, light):
    """What its launches take does not hide behind the work of six hundred rows."""
    how = {"max_num_seqs": 23, "enable_prefix_caching": False, "max_num_batched_tokens": 2048}

    def rounds():
        with LLM(model, **SIZES, **how) as llm:
            steps = llm.assembly.engine.executor._host.runner._recorded
            outs = [out for _ in range(4) for out in llm.generate(*asked(23))]
            return [out.outputs[0].token_ids for out in outs], steps._graphs()

    want, _ = rounds()
    recording()
    monkeypatch.setattr(recorded, "LIGHT", recorded.LIGHT if light else 0)
    texts, kinds = rounds()
    most = max(kind.tokens for kind in kinds)
    assert texts == want
    assert 1024 < most <= recorded.MOST_ROWS_LIGHT if light else most <= recorded.MOST_ROWS


@pytest.mark.parametrize("deep", [False, True], ids=["one ahead", "two ahead"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_short_memory_makes_room_by_preemption(model, recording, dtype, deep):
    """Slots change hands and pages move."""
    more = {"dtype": dtype, "kv_cache_memory": "60KiB" if dtype == "float32" else "30KiB"}
    more |= {"max_model_len": 64}
    want = said(model, *asked(12), **more)
    counts = recording(deep)
    assert said(model, *asked(12), **more) == want and counts["replays"] > 10


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"logit_bias": {7: 2.0}},
        {"allowed_token_ids": [5, 6, 7, 8]},
        {"bad_words": ["a"]},
        {"min_tokens": 3, "stop_token_ids": [9]},
        {"prompt_logprobs": 1},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_a_row_that_asks_for_more_takes_its_step_back_to_halves(model, recording, wish):
    prompts, params = asked(6)
    params[2] = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, **wish)
    want = said(model, prompts, params)
    counts = recording()
    assert said(model, prompts, params) == want
    assert counts["replays"] > 5  # once that row has ended


@pytest.mark.parametrize("wish", [{"logprobs": 2}, {"stop_token_ids": [9]}, {"min_tokens": 3}])
def test_two_steps_are_on_their_way_where_steps_are_short(model, monkeypatch, recording, wish):
    """And none is lost: requests that stop, that are aborted, and others in their slots."""
    prompts, params = asked(14)
    params[3] = SamplingParams(temperature=0, max_tokens=12, **wish)

    def run():
        most = 0
        with LLM(model, **SIZES, max_num_seqs=4) as llm:
            flying = llm.assembly.engine._in_flight
            take = flying.take

            def watched():
                nonlocal most
                most = max(most, len(flying))
                return take()

            monkeypatch.setattr(flying, "take", watched)
            outs = llm.generate(prompts, params)
            llm._driver.ask(lambda engine: engine.check_integrity())
        return [out.outputs[0].token_ids for out in outs], most

    want, one = run()
    recording(deep=True)
    texts, two = run()
    assert texts == want and (one, two) == (2, 3), "one more while the next step is planned"


def test_a_broken_row_ends_alone(model, monkeypatch, recording):
    """A NaN in the logits of one row of a recorded step."""
    from deepinfer.models.llama import LlamaModel

    right = LlamaModel.logits
    prompts, _ = asked(7)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 7
    ids = [set(found[6:]) for found, *_ in said(model, prompts, params)]
    spoilt = min(ids[0] - ids[1])

    def logits(self, hidden):
        out = right(self, hidden)
        out[out.argmax(1) == spoilt] = torch.nan
        return out

    monkeypatch.setattr(LlamaModel, "logits", logits)

    def faults(llm):
        return [type(o.error).__name__ for o in llm.generate(prompts, params)]

    with LLM(model, **SIZES) as llm:
        want = faults(llm)
    counts = recording()
    with LLM(model, **SIZES) as llm:
        assert faults(llm) == want and counts["replays"] > 3
    assert 0 < want.count("ModelFaultError") < 7


def test_without_memory_for_graphs_steps_are_launched(model, recording, caplog):
    want = said(model, *asked(9))
    counts = recording()
    counts["full"] = True
    assert said(model, *asked(9)) == want
    assert counts["replays"] == 0
    assert sum("launched kernel by kernel" in line for line in caplog.messages) == 1


def test_there_are_only_so_many_graphs(model, monkeypatch, recording):
    want = said(model, *asked(23))
    counts = recording()
    monkeypatch.setattr(recorded, "MOST_GRAPHS", 1)
    assert said(model, *asked(23)) == want
    assert counts["recorded"] == 1 and counts["replays"] > 3


def test_steps_stay_in_larger_graphs_where_no_more_may_be_recorded(model, monkeypatch, recording):
    prompts, params = asked(3)
    params = [SamplingParams(temperature=0, max_tokens=40 if i else 80, ignore_eos=True)
              for i in range(3)]  # fmt: skip
    want = said(model, prompts, params)
    counts = recording()
    monkeypatch.setattr(recorded, "MOST_GRAPHS", 1)
    monkeypatch.setattr(recorded, "MORE", (0,))  # prompts go in halves
    monkeypatch.setattr(recorded, "WISHED", 12)
    assert said(model, prompts, params) == want
    assert counts["recorded"] == 1 and counts["replays"] > 70


@pytest.mark.parametrize("moved", [False, True])
def test_memory_that_runs_out_in_a_whole_step(model, monkeypatch, moved, recording):
    """Before the table has moved on the step runs again, in halves; afterwards it cannot."""
    want = said(model, *asked(5))
    recording()
    right, calls = ModelRunner._whole, []

    def whole(runner, *args):
        calls.append(args)
        outcome = right(runner, *args) if moved else None
        if len(calls) == 1:
            raise torch.OutOfMemoryError("none left")
        return outcome or right(runner, *args)

    monkeypatch.setattr(ModelRunner, "_whole", whole)
    if not moved:
        assert said(model, *asked(5)) == want
        return
    with pytest.raises(EngineDeadError, match="none left"):
        said(model, *asked(5))


def test_a_traced_runner_goes_launch_by_launch(model, recording):
    """Whoever watches steps sees each of them."""

    class Watch:
        steps = 0

        def begin_step(self, plan, step):
            Watch.steps += 1

        def end_step(self):
            pass

    counts = recording()
    with LLM(model, **SIZES) as llm:
        llm.assembly.engine.executor.call("trace", Watch())
        llm.generate(*asked(5))
    assert Watch.steps > 10 and counts["recorded"] == 0


def test_models_that_keep_state_are_not_recorded(recording, tmp_path):
    from deepinfer.testing.tiny_v41 import write_tiny_v41

    counts = recording()
    path = str(write_tiny_v41(tmp_path))
    with LLM(path, max_model_len=64, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, params)
    assert counts["recorded"] == 0


def test_tiers_hold_their_rows_and_few_more():
    assert [tier(n) for n in (1, 2, 3, 5, 9, 17, 33, 49, 65, 129)] == [
        1, 2, 4, 8, 16, 32, 48, 64, 96, 160,
    ]  # fmt: skip
    for rows in range(1, 600):
        assert rows <= tier(rows) < 2 * rows and tier(tier(rows)) == tier(rows)
    for rows in (1, 2, 4, 8, 16, 48, 64):
        for drafts in range(5 * rows + 1):
            assert drafts <= draft_tier(rows, drafts) <= 5 * rows
        assert len({draft_tier(rows, drafts) for drafts in range(5 * rows + 1)}) == 6


def test_a_step_runs_in_a_larger_graph_until_its_own_is_worth_it(model, monkeypatch, recording):
    """Sixteen requests, then three at a time: the graph of sixteen does, for so many steps."""
    want = [said(model, *asked(count), max_num_seqs=16) for count in (16, 3)]
    counts = recording()
    monkeypatch.setattr(recorded, "WISHED", 20 * 13)  # tokens that sixteen rows have beside three
    with LLM(model, **SIZES, max_num_seqs=16) as llm:
        texts = []
        for count in (16, *[3] * 6):
            outs = llm.generate(*asked(count))
            texts.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason, None) for o in outs])
            if len(texts) == 3:
                few = counts["recorded"]
    assert texts[0] == want[0] and all(text == want[1] for text in texts[1:])
    assert few < counts["recorded"]


def test_what_is_measured_has_graphs_of_its_own(model, recording):
    """A step of two requests costs what one costs, not what the graph of eight would."""
    recording()
    with LLM(model, **SIZES, max_num_seqs=9) as llm:
        executor = llm.assembly.engine.executor
        steps = executor._host.runner._recorded
        shapes = [StepShape(8, 0, False), StepShape(2, 0, False), StepShape(2, 0, True)]
        assert min(executor.call("measure", shapes)[0]) > 0
        graphs = {kind for kind, stage in steps._stages.items() if stage.replay is not None}
        assert {(kind.rows, kind.propose) for kind in graphs} == {(8, False), (2, False), (2, True)}
        prompts, _ = asked(3)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        rows = {kind.rows for kind in steps._graphs() if not kind.more}
        assert rows == {8, 2}, "afterwards a graph serves smaller steps again"


@pytest.mark.parametrize(
    "kind, served",
    [
        ((16, 0, 32, 1024, False, True), True),
        ((9, 0, 16, 512, False, True), True),
        ((17, 0, 32, 1024, False, True), False),
        ((16, 0, 64, 1024, False, True), False),
        ((16, 0, 0, 1024, False, True), False),
        ((16, 0, 32, 2048, False, True), False),
        ((16, 16, 32, 1024, False, True), False),
        ((16, 0, 32, 1024, True, True), False),
        ((16, 0, 32, 1024, False, False), False),
    ],
)
def test_a_graph_serves_smaller_steps_of_its_sort(kind, served):
    assert recorded._Kind(16, 0, 32, 1024, False, True).serves(recorded._Kind(*kind)) == served


def test_no_graph_serves_steps_far_smaller():
    large = recorded._Kind(512, 0, 0, 1024, False, True)
    assert large.serves(large._replace(rows=256)) and not large.serves(large._replace(rows=192))
    assert not recorded._Kind(1, 0, 256, 1024, False, True).serves(large._replace(rows=1))
    prompt = large._replace(rows=1, more=512)
    assert prompt.serves(prompt._replace(more=256)) and not prompt.serves(prompt._replace(more=128))


def test_of_a_heavy_model_no_graph_serves_steps_much_smaller():
    large = recorded._Kind(256, 0, 0, 1024, False, True)
    assert large.serves(large._replace(rows=224), heavy=True)
    assert not large.serves(large._replace(rows=192), heavy=True)
    few = large._replace(rows=64)
    assert few.serves(large._replace(rows=1), heavy=True)
    assert not large._replace(rows=80).serves(large._replace(rows=1), heavy=True)


def test_steps_of_a_heavy_model_are_launched_until_they_have_come_often(
    model, monkeypatch, recording
):
    want = said(model, *asked(9))
    monkeypatch.setattr(recorded, "HEAVY", 1)
    monkeypatch.setattr(recorded, "SMALL_HEAVY", 4)
    counts = recording()
    assert said(model, *asked(9)) == want
    assert 0 < counts["recorded"] < 3 and counts["replays"] > 0


def test_graphs_are_given_back(model, recording):
    recording()
    with LLM(model, **SIZES) as llm:
        llm.generate(*asked(5))
        runner = llm.assembly.engine.executor._host.runner
        steps = runner._recorded
        assert isinstance(steps, RecordedSteps) and steps._stages
    assert not steps._stages
