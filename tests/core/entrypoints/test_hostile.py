"""Values that once stopped the engine for everybody, or left as foreign exceptions."""

import os
import signal

import numpy as np
import pytest
import torch
from deepinfer import LLM, SamplingParams
from deepinfer.errors import InvalidRequestError
from deepinfer.testing.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path, "llama", seed=1)
    with LLM(path, scheduling_policy="priority", max_model_len=64) as llm:
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
