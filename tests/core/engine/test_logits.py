"""Parameters for the slot table, and the place of masks."""

import numpy as np
import pytest
from deepinfer.api.plan import DECODE, BatchPlan, RowBlock
from deepinfer.engine.logits import LogitsPipeline, to_row_params
from deepinfer.engine.output import OutputState
from deepinfer.engine.request import RequestState, Status
from deepinfer.errors import InvalidRequestError
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.toy import ToyGrammar, ToyGrammarBackend, ToyTokenizer


def convert(encode=None, eos=(0,), **options):
    return to_row_params(SamplingParams(**options), 5, eos, 17, encode)


def test_defaults_are_off():
    row = convert(temperature=0.0)
    assert (row.prompt_len, row.top_k, row.min_len, row.stop_ids) == (5, 0, 0, (0,))
    assert (row.logprobs, row.prompt_logprobs, row.allowed_token_ids) == (-1, -1, None)


def test_bounds_become_absolute_and_whole():
    row = convert(min_tokens=3, stop_token_ids=[4, 2], top_k=-1, logprobs=-1, prompt_logprobs=2)
    assert (row.min_len, row.stop_ids, row.top_k) == (8, (0, 2, 4), 0)
    assert (row.logprobs, row.prompt_logprobs) == (17, 2)
    assert convert(ignore_eos=True, stop_token_ids=[4]).stop_ids == (4,)
    assert convert(top_k=99).top_k == 0


@pytest.mark.parametrize(
    "field, value",
    [("stop_token_ids", [17]), ("logit_bias", {99: 1.0}), ("allowed_token_ids", [3, -1])],
)
def test_ids_outside_the_vocabulary_are_named(field, value):
    with pytest.raises(InvalidRequestError, match=r"outside the vocabulary \(0 … 16\)") as error:
        convert(**{field: value})
    assert error.value.setting == field


def test_bad_words_are_spelt_with_and_without_a_space():
    spellings = {"c": (6,), " c": (5,), "ab": (3,), " ab": (15, 3)}
    row = convert(spellings.__getitem__, bad_words=["c", "ab"])
    assert row.bad_words == ((6,), (5,), (3,))
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        convert(bad_words=["c"])
    with pytest.raises(InvalidRequestError, match="id 40"):
        convert(lambda text: (40,), bad_words=["c"])


def test_masks_name_their_rows(lab):
    grammar = ToyGrammar(4, 17)
    states = []
    for constrained, drafts in ((False, []), (True, [2, 3]), (True, []), (True, [])):
        request = lab.request()
        r = RequestState(request, OutputState(request, ToyTokenizer()))
        r.grammar, r.drafts = grammar if constrained else None, drafts
        states.append(r)
    states[3].status = Status.FINISHED
    rows = [(0, DECODE, 3, 1, 0), (1, DECODE, 3, 1, 0), (2, 0, 5, 1, 0), (3, DECODE, 3, 1, 0)]
    plan = BatchPlan(
        1, (), RowBlock(np.array(rows, np.int32)), np.zeros((0, 3), np.int32), constrained=True
    )
    inputs = LogitsPipeline(17, 2, ToyGrammarBackend(17)).prepare(plan, states, lambda r, why: None)
    legal = grammar.fork().fill(np.zeros((3, 1), np.int32), [2, 3])
    assert inputs.index.tolist() == [*range(3, 4 + legal), 6]
    bits = np.unpackbits(inputs.bitmask.view(np.uint8), axis=1, bitorder="little")
    assert (bits[0, :17].astype(bool) == grammar.mask()).all()
    assert grammar.state == 1
