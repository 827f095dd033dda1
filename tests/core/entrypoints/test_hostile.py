"""Values that once stopped the engine for everybody, or left as foreign exceptions."""

import os
import signal

import numpy as np
import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig, parse_bytes
from deepinfer.errors import ConfigError, DeepInferError, InvalidRequestError
from deepinfer.testing.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llama", seed=1)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, scheduling_policy="priority", max_model_len=64) as llm:
        yield llm


def errors(outputs):
    return [type(output.error) for output in outputs]


def test_more_min_tokens_than_any_text_has(llm):
    params = SamplingParams(min_tokens=10**20, max_tokens=None)
    outputs = llm.generate([[5, 6], [7]], [SamplingParams(), params])
    assert errors(outputs) == [type(None)] * 2
    assert outputs[1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("priority", ["x", float("nan"), [], 1.5])
def test_a_priority_that_is_no_number_fails_alone(llm, priority):
    outputs = llm.generate([[5], [6]], priority=[priority, 1])
    assert errors(outputs) == [InvalidRequestError, type(None)]


def test_priorities_of_numpy_and_none(llm):
    assert errors(llm.generate([[5], [6]], priority=[None, np.int64(3)])) == [type(None)] * 2


@pytest.mark.parametrize("update", [{"logit_bias": {5: "x"}}, {"temperature": -1.0}])
def test_copies_of_parameters_are_checked(update):
    with pytest.raises(InvalidRequestError, match=next(iter(update))):
        SamplingParams(top_k=3).model_copy(update=update)
    copy = SamplingParams(top_k=3).model_copy(update={"temperature": 0.5})
    assert (copy.top_k, copy.temperature) == (3, 0.5)


@pytest.mark.parametrize(
    "prompts",
    [[np.array([5, 6]), np.array([7, 8, 9])], torch.tensor([[5, 6], [7, 8]])],
)
def test_arrays_of_ids_are_prompts(llm, prompts):
    assert [o.prompt_token_ids for o in llm.generate(prompts)] == [list(p) for p in prompts]


@pytest.mark.parametrize("prompt", [np.array(5), b"abc", {5, 6}, 5])
def test_what_is_no_prompt_is_named(llm, prompt):
    with pytest.raises(InvalidRequestError, match=type(prompt).__name__):
        llm.generate(prompt)


def test_a_nested_array_fails_alone(llm):
    outputs = llm.generate([{"prompt_token_ids": np.array([[5, 6]])}, [7]])
    assert errors(outputs) == [InvalidRequestError, type(None)]


@pytest.mark.parametrize("field", ["stop", "bad_words", "stop_token_ids"])
def test_a_list_is_asked_for_by_name(field):
    with pytest.raises(InvalidRequestError, match=field):
        SamplingParams(**{field: 5})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_that_it_has_no_engine(llm):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            llm.generate([5])
        except Exception as why:
            os._exit(0 if "belongs to process" in str(why) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.generate([5])[0].error is None


ODD = (
    10**5000, 10**30, 2**63, 2**40, -1, 0, 1.5, float("nan"), float("inf"), True, None, b"abc",
    [], ["a", 1], {"a": 1}, object(), "", "x" * 5000, "9" * 400 + "GiB", "1e400", "\0", "\udc80",
    "cpu", "~nobody-lives-here/x", "/" + "a" * 5000, "a/" * 3000, "a" * 300 + ".gguf",
)  # fmt: skip


@pytest.mark.parametrize("name", EngineConfig.model_fields)
def test_a_setting_of_any_value_is_taken_or_refused_by_name(name, model, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tmp_path))  # the hub is not asked
    for value in ODD:
        arguments = {"model": model, "num_threads": 1, "max_num_seqs": 4, name: value}
        try:
            with LLM(**arguments) as llm:
                assert len(llm.generate([5, 6], SamplingParams(max_tokens=2))) == 1
        except DeepInferError as why:
            blamed = f"{name} DEEPINFER_HF_MODEL_DIR"
            assert why.setting and (why.setting in blamed or name in str(why)), str(why)
            assert len(str(why)) < 1500


def test_a_variable_of_any_value_is_named(monkeypatch):
    for value in ("x" * 5000, "/" + "a" * 5000, "~nobody-lives-here/x", "a/" * 3000):
        monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", value)
        with pytest.raises(DeepInferError, match="DEEPINFER_HF_MODEL_DIR"):
            LLM("org/name")


def test_the_configuration_itself_refuses_like_make():
    for make in (EngineConfig, EngineConfig.make):
        with pytest.raises(ConfigError, match=r"max_num_seqs=0: .*; nonsense: no such engine arg"):
            make(model="x", max_num_seqs=0, nonsense=1)


def test_one_name_is_a_name_and_not_its_letters(model):
    assert EngineConfig.make(model="x", disable_plugins="cpu").disable_plugins == ("cpu",)
    with pytest.raises(DeepInferError, match="disable_plugins names nobody, which"):
        LLM(model, disable_plugins="nobody")


@pytest.mark.parametrize(
    "name", [n for n, f in SamplingParams.model_fields.items() if "tuple" in str(f.annotation)]
)
def test_a_text_is_never_taken_for_a_sequence_of_letters(name):
    try:
        assert getattr(SamplingParams(**{name: "ab"}), name) == ("ab",)
    except InvalidRequestError as why:
        assert why.setting == name


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2**31),
        ("0.1GiB", 2**30 // 10),
        ("1.5k", 1500),
        (" 7 b", 7),
        (7, 7),
        ("9" * 400 + "g", int("9" * 400) * 10**9),
    ],
)
def test_bytes_are_counted_exactly(text, count):
    assert parse_bytes(text) == count
