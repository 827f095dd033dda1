"""Structured output of the real demo model, beside everything else that a request may ask for."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import pytest
from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.errors import ConfigError, InvalidRequestError, PluginError, UnsupportedError

pytestmark = pytest.mark.model

PROMPT = "Write about a city as JSON: "
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0},
        "kind": {"enum": ["capital", "port", "village"]},
    },
    "required": ["city", "people", "kind"],
    "additionalProperties": False,
}


def params(kind, rule=None, **more):
    given = {"max_tokens": 96, "temperature": 1.0, "seed": 1}
    return SamplingParams(so_args={"schema_type": kind, "schema": rule}, **{**given, **more})


def one(llm, wish, prompt=PROMPT):
    output = llm.generate(prompt, wish)[0]
    assert output.error is None, output.error
    return output.outputs[0]


def test_every_seed_gives_a_valid_object(llm):
    outputs = llm.generate([PROMPT] * 16, [params("json", CITY, seed=i) for i in range(16)])
    texts = [output.text for output in outputs]
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop", output
        jsonschema.validate(json.loads(output.text), CITY)
    assert len(set(texts)) > 8
    assert not any(set(o.outputs[0].token_ids) & {0, 2} for o in outputs)  # no end token is drawn


@pytest.mark.parametrize(
    "wish, pattern",
    [
        (params("regex", r"[A-Z][a-z]{2,8}-\d{3}"), r"[A-Z][a-z]{2,8}-\d{3}"),
        (params("choice", ["Париж", "東京", 'a "b"\n']), 'Париж|東京|a "b"\n'),
        (params("ebnf", 'root ::= "<" [a-z]{1,5} ">" root?', seed=3), r"(<[a-z]{1,5}>)+"),
        (SamplingParams(structured_outputs={"regex": "ja|nein"}, max_tokens=9), "ja|nein"),
    ],
)
def test_other_rules_match_whole(llm, wish, pattern):
    output = one(llm, wish)
    if output.finish_reason == "stop":
        assert re.fullmatch(pattern, output.text), output.text
    assert output.finish_reason in ("stop", "length")


def test_a_grammar_that_has_ended_ends_the_text_whatever_min_tokens_says(llm):
    for more in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "stop": ["q"]}):
        output = one(llm, params("regex", "[0-9]{4}", **more))
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert re.fullmatch("[0-9]{4}", output.text)


def test_a_text_that_may_end_goes_on_where_the_end_is_not_wanted(llm):
    """More digits may follow: min_tokens and ignore_eos hold, and the cut is called a cut."""
    short = one(llm, params("regex", "[0-9]+", max_tokens=24, logit_bias={2: 50.0, 0: 50.0}))
    assert len(short.token_ids) == 2 and short.finish_reason == "stop" and short.text.isdigit()
    bias = {2: 50.0}
    longer = one(llm, params("regex", "[0-9]+", max_tokens=24, min_tokens=9, logit_bias=bias))
    assert len(longer.token_ids) == 10 and longer.text.isdigit()
    never = one(llm, params("regex", "[0-9]+", max_tokens=24, ignore_eos=True, logit_bias=bias))
    assert len(never.token_ids) == 24 and never.finish_reason == "length" and never.text.isdigit()


def test_stop_strings_and_stop_ids_still_stop(llm):
    whole = one(llm, params("json", CITY))
    output = one(llm, params("json", CITY, stop=['"people"']))
    assert output.stop_reason == '"people"' and output.finish_reason == "stop"
    assert output.text == whole.text[: whole.text.index('"people"')]
    token = whole.token_ids[5]
    output = one(llm, params("json", CITY, stop_token_ids=[token]))
    first = whole.token_ids.index(token)
    assert output.token_ids == whole.token_ids[: first + 1] and output.stop_reason == token


def test_samples_logprobs_and_a_mixed_batch(llm):
    """A constrained request draws the same alone and in a batch, and others do not notice it."""
    wish = params("json", CITY, n=3, logprobs=2)
    samples = llm.generate(PROMPT, wish)[0].outputs
    assert len({sample.text for sample in samples}) > 1
    for sample in samples:
        jsonschema.validate(json.loads(sample.text), CITY)
        assert len(sample.logprobs) == len(sample.token_ids)
        assert all(t in table for t, table in zip(sample.token_ids, sample.logprobs, strict=True))
    free = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    alone = llm.generate("Once upon a time", free)[0].text
    mixed = llm.generate(
        ["Once upon a time", PROMPT, PROMPT, "Once upon a time"],
        [free, wish, params("regex", "a{3}"), free],
    )
    assert mixed[0].text == alone == mixed[3].text and mixed[2].text == "aaa"
    assert [s.text for s in mixed[1].outputs] == [s.text for s in samples]


def test_streaming_never_takes_back_and_ends_with_the_grammar(llm):
    async def run():
        async with AsyncLLM("demo", max_model_len=256, kv_cache_memory="64MiB") as engine:
            seen = ""
            wish = params("json", CITY).model_copy(update={"output_kind": "delta"})
            async for output in engine.generate(PROMPT, wish, request_id="a"):
                seen += output.text
            return seen

    assert asyncio.run(run()) == one(llm, params("json", CITY)).text


def test_preemption_and_prefix_cache_leave_no_trace(llm):
    """KV for a fraction of the batch: requests give way, come back, and say the same."""
    prompt = PROMPT * 4  # longer than a page, so that there is something to find again
    wishes = [params("json", CITY, seed=i) for i in range(6)]
    right = [output.text for output in llm.generate([prompt] * 6, wishes)]
    with LLM("demo", max_model_len=128, max_num_seqs=6, kv_cache_memory="6MiB") as small:
        got = [output.text for output in small.generate([prompt] * 6, wishes)]
        alone = [small.generate([prompt], wish)[0].text for wish in wishes]
        counters = small.get_metrics()["counters"]
    assert got == right == alone
    assert counters.preemptions > 0 and counters.cached_tokens > 0
    assert counters.grammars == 6 or counters.grammar_hits >= 6


def test_a_refused_spec_takes_nobody_along(llm):
    bad = params("json", {"type": "object", "properties": {"a": {"pattern": "(?=x)"}}})
    good = params("regex", "ab")
    results = llm.generate([PROMPT] * 3, [good, bad, good])
    assert [r.text for r in results] == ["ab", "", "ab"]
    assert isinstance(results[1].error, InvalidRequestError)
    assert "/properties/a" in str(results[1].error)
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a", "choice": ["b"]})


def test_what_excludes_everything_is_an_error_that_says_so(llm):
    result = llm.generate(
        [PROMPT, PROMPT], [params("regex", "a"), params("regex", "a", allowed_token_ids=[5])]
    )
    assert result[0].text == "a" and "no token may be sampled" in str(result[1].error)


def test_counters_tell_compiled_and_cached(llm):
    before = llm.get_metrics()["counters"]
    before = before.grammars, before.grammar_hits, before.grammar_seconds
    for _ in range(3):
        one(llm, params("regex", "xyz"))
    after = llm.get_metrics()["counters"]
    assert (after.grammars - before[0], after.grammar_hits - before[1]) == (1, 2)
    assert after.grammar_seconds > before[2] and after.mask_seconds > 0


def test_who_applies_masks_changes_no_text(llm):
    right = one(llm, params("json", CITY)).text
    with LLM("demo", max_model_len=256, grammar_acceleration="cpu") as reference:
        assert one(reference, params("json", CITY)).text == right
    with pytest.raises(UnsupportedError, match="grammar_acceleration='cuda' cannot be kept"):
        LLM("demo", max_model_len=256, device="cpu", grammar_acceleration="cuda")


def test_a_backend_by_name_and_none():
    with pytest.raises(PluginError, match=r"no_such.*\n?.*Known: xgrammar"):
        LLM("demo", grammar_backend="no_such")
    with pytest.raises(ConfigError, match="max_whitespac: no such option"):
        LLM("demo", plugin_config={"structured": {"max_whitespac": 1}})
    with (
        LLM("demo", max_model_len=64, disable_plugins="structured") as bare,
        pytest.raises(InvalidRequestError, match="needs a grammar plugin"),
    ):
        bare.generate("x", params("regex", "a"))


def test_pydantic_models_and_types_are_schemas(llm):
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=8)
        size: int = Field(ge=0, le=9)

    output = one(llm, params("json", City))
    assert City.model_validate_json(output.text).size <= 9
    output = one(llm, SamplingParams(structured_outputs={"json": bool}, max_tokens=4))
    assert output.text in ("true", "false")


def test_blanks_and_digits_are_bounded(llm):
    """The loops that models fall into end by themselves."""
    tokenizer = llm.get_tokenizer()
    blanks = {i: 60.0 for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i).strip()}
    digits = {i: 60.0 for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isdigit()}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for bias in (blanks, digits):
        output = one(llm, params("json", schema, logit_bias=bias, max_tokens=200))
        assert output.finish_reason == "stop", output
        assert len(output.text) < 120
    rule = {"schema_type": "json", "schema": schema, "max_whitespace": 0, "max_digits": 2}
    wish = SamplingParams(so_args=rule, max_tokens=60, logit_bias=digits)
    assert re.fullmatch(r'\{"n":-?\d{1,2}\}', one(llm, wish).text)
