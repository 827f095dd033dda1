"""A conversation with a checkpoint of this model, through the front door."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepinfer import LLM, SamplingParams
from deepinfer.errors import InvalidRequestError

pytest.importorskip("deepseek_recipe")

MODEL = Path(__file__).parents[3] / "data" / "deepseek-v41" / "a"
TALK = [{"role": "user", "content": "Hi </think> there"}]
PIXEL = {"type": "image", "image": b"x"}


def test_the_checkpoint_gets_the_format_of_its_family():
    params = SamplingParams(temperature=0, max_tokens=3)
    with LLM(str(MODEL), max_model_len=400, max_num_seqs=2, kv_cache_memory="64MB") as llm:
        outputs = [llm.chat(TALK, params, enable_thinking=on)[0] for on in (True, False)]
        with pytest.raises(InvalidRequestError, match="is no image that can be read"):
            llm.chat([{"role": "user", "content": [PIXEL]}], params)
        closed = llm.get_tokenizer().token_to_id("</think>")
    thinking, plain = outputs
    assert thinking.prompt_token_ids.count(closed) == 0  # the typed one is plain text
    assert plain.prompt_token_ids.count(closed) == 1
    assert plain.outputs[0].message.content == plain.text
    assert thinking.outputs[0].message.reasoning_content is not None
