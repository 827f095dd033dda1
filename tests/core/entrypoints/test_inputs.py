"""What callers type becomes requests, or errors that name it."""

import numpy as np
import pytest
from deepinfer import SamplingParams
from deepinfer.engine.request import mix
from deepinfer.entrypoints.inputs import as_list, one_each
from deepinfer.errors import InvalidRequestError


@pytest.fixture
def preparer(toy):
    assembly = toy.assembly()
    yield assembly.preparer
    assembly.engine.close()


def prepare(preparer, prompt, **params):
    return preparer.prepare("r", prompt, SamplingParams(**params))


def test_single_prompts_and_lists_are_told_apart():
    assert as_list("ab") == ["ab"]
    assert as_list([1, 2]) == [[1, 2]]
    assert as_list(np.array([1, 2])) == [[1, 2]]
    assert as_list({"prompt": "a"}) == [{"prompt": "a"}]
    assert as_list(["a", [1], {"prompt": "b"}]) == ["a", [1], {"prompt": "b"}]
    assert as_list([]) == []
    with pytest.raises(InvalidRequestError, match="not int"):
        as_list(3)


def test_one_value_for_all_or_one_each():
    assert one_each("priority", 3, int, 2) == [3, 3]
    assert one_each("priority", [1, 2], int, 2) == [1, 2]
    with pytest.raises(InvalidRequestError, match="priority has 1 entries for 2 prompts"):
        one_each("priority", [1], int, 2)


def test_every_form_of_a_prompt(preparer):
    assert prepare(preparer, "ab").token_ids == (3,)
    assert prepare(preparer, {"prompt": "ab"}).prompt == "ab"
    assert prepare(preparer, [1, 2]).token_ids == (1, 2)
    both = prepare(preparer, {"prompt": "ab", "prompt_token_ids": [1, 2]})
    assert (both.prompt, both.token_ids) == ("ab", (1, 2))
    assert prepare(preparer, np.array([1, 2])).token_ids == (1, 2)


def test_samples_become_requests_with_seeds_of_their_own(preparer):
    prepared = prepare(preparer, [1], n=3, seed=9)
    assert [r.id for r in prepared.requests] == ["r#0", "r#1", "r#2"]
    assert [r.seed for r in prepared.requests] == [9, mix(9, 1), mix(9, 2)]
    assert prepare(preparer, [1], seq_seed=9).requests[0].seed == 9


def test_requests_without_a_seed_draw_one_each_from_the_engines(toy):
    seeds = []
    for _ in range(2):
        assembly = toy.assembly(seed=5)
        one, two = prepare(assembly.preparer, [1]), prepare(assembly.preparer, [1])
        seeds.append((one.requests[0].seed, two.requests[0].seed))
        assembly.engine.close()
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]
    assembly = toy.assembly(seed=None)
    drawn = {prepare(assembly.preparer, [1]).requests[0].seed for _ in range(4)}
    assembly.engine.close()
    assert len(drawn) == 4


def test_length_ends_at_max_tokens_or_the_context(preparer):
    assert prepare(preparer, [1, 2], max_tokens=5).requests[0].limit == 7
    assert prepare(preparer, [1, 2], max_tokens=500).requests[0].limit == 64
    assert prepare(preparer, [1, 2], max_tokens=None).requests[0].limit == 64


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([1] * 64, {}, "64 tokens and max_model_len is 64"),
        ([17], {}, "prompt_token_ids: id 17 is outside the vocabulary (0 … 16)"),
        ([-1], {}, "id -1"),
        ([1, "x"], {}, "'x', which is no token id"),
        ([True], {}, "no token id"),
        ({"text": "x"}, {}, "'prompt' or 'prompt_token_ids', not 'text'"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids: id 99 is outside the vocabulary"),
        ([1], {"logit_bias": {20: 1.0}}, "logit_bias: id 20 is outside"),
        ([1], {"allowed_token_ids": [3, 17]}, "allowed_token_ids: id 17 is outside"),
    ],
)
def test_what_cannot_run_is_named(preparer, prompt, params, words):
    with pytest.raises(InvalidRequestError) as caught:
        prepare(preparer, prompt, **params)
    assert words in str(caught.value)


def test_params_of_another_type_are_refused(preparer):
    with pytest.raises(InvalidRequestError, match="dict, not SamplingParams"):
        preparer.prepare("r", [1], {"temperature": 0})


def test_a_model_without_images_refuses_them_by_name(toy):
    asked = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": b"picture"}}
    llm = toy.llm()
    with pytest.raises(InvalidRequestError, match=r"\['image'\]\[0\] is an image, and .* takes no"):
        llm.generate(asked)
    output = llm.generate([asked, [1, 2]])
    assert output[0].error is not None and output[1].error is None
    assert llm.generate({"prompt_token_ids": [1], "multi_modal_data": None})[0].error is None
