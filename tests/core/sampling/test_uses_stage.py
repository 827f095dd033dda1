"""The host's short answer to "does a row use a stage" is that of the stages themselves."""

import torch
from deepinfer.api.plan import RowParams
from deepinfer.sampling.pipeline import gather_stages, uses_stage
from hypothesis import given
from hypothesis import strategies as st

PARAMS = st.builds(
    RowParams,
    prompt_len=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    min_len=st.integers(0, 12),
    stop_ids=st.sampled_from([(), (3,)]),
    logit_bias=st.sampled_from([(), ((4, 1.0),)]),
    allowed_token_ids=st.sampled_from([None, (), (1, 2)]),
    bad_words=st.sampled_from([(), ((),), ((5,),), ((5, 6),)]),
)


@given(PARAMS)
def test_it_is_what_the_stages_say(params):
    assert uses_stage(params) == gather_stages([params], 9, torch.device("cpu")).any
