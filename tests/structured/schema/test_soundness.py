"""The promise: what the grammar of a schema produces is valid, for any schema that is not refused.

Random walks through xgrammar, judged by jsonschema; and the other way round, random changes of
such texts are of the grammar exactly when they are valid, but for the spellings that are left out.
"""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import islice, permutations, product

import jsonschema
import pytest
from deepinfer_structured.schema import SchemaOptions, UnsupportedSchemaError, compile_schema
from grammars import accepts, compiled, walk
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from random_schemas import SCHEMAS, VALUES

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)
POLICIES = st.sampled_from(["declared_only", "allow", "never"])


def valid(schema, text):
    """As decimals, for JSON has no binary fractions: 0.3 is a multiple of 0.1."""
    schema, instance = (json.loads(t, parse_float=Decimal) for t in (json.dumps(schema), text))
    return jsonschema.Draft202012Validator(schema).is_valid(instance)


def compile_or_none(schema, **options):
    """The grammar, or None where the schema is refused."""
    try:
        found = compile_schema(schema, SchemaOptions(max_work=500_000, **options))
    except UnsupportedSchemaError as error:
        event(f"refused: {error.unsupported.keyword}")
        return None
    event("compiled")
    return compiled(found.ebnf)


def check_walks(schema, rng, policy, walks=6):
    grammar = compile_or_none(schema, additional_properties=policy)
    for _ in range(walks if grammar else 0):
        text = walk(grammar, rng, 300)
        assert text is None or valid(schema, text), text


@QUIET
@given(SCHEMAS, st.randoms(use_true_random=False), POLICIES)
def test_every_text_is_valid(schema, rng, policy):
    """Or the schema was refused."""
    check_walks(schema, rng, policy)


@pytest.mark.slow
@settings(QUIET, max_examples=3000)
@given(SCHEMAS, st.randoms(use_true_random=False), POLICIES)
def test_every_text_is_valid_at_length(schema, rng, policy):
    """The same for long."""
    check_walks(schema, rng, policy)


def orders(value):
    """The value with the keys of its objects in other orders, a few hundred at most."""
    if isinstance(value, dict):
        inner = [list(islice(orders(child), 50)) for child in value.values()]
        for places in islice(permutations(range(len(value))), 50):
            keys = [list(value)[place] for place in places]
            for children in islice(product(*(inner[place] for place in places)), 50):
                yield dict(zip(keys, children, strict=True))
    elif isinstance(value, list):
        yield from map(list, product(*(list(islice(orders(child), 50)) for child in value)))
    else:
        yield value


CLOSED = {"minProperties", "contains", "not", "oneOf", "if", "unevaluatedProperties", "format"}


def mentions(schema, words):
    """Whether a keyword stands anywhere in a schema."""
    text = json.dumps(schema)
    return any(f'"{word}"' in text for word in words)


@settings(QUIET, max_examples=30)
@given(SCHEMAS, st.lists(st.recursive(VALUES, lambda v: st.lists(v, max_size=3) | st.dictionaries(
    st.sampled_from("abcde"), v, max_size=3), max_leaves=5), max_size=12))  # fmt: skip
def test_values_are_judged_as_by_jsonschema(schema, values):
    """Invalid ones are never of the grammar; valid ones are, in some order of their keys.

    Valid ones may be left out only where demands for keys that are not listed narrow the grammar.
    """
    grammar = compile_or_none(schema, additional_properties="allow", formats="annotate")
    for value in values if grammar else ():
        good = valid(schema, json.dumps(value))
        texts = (json.dumps(each, ensure_ascii=False) for each in islice(orders(value), 300))
        found = any(accepts(grammar, text) for text in texts)
        assert good or not found, value
        assert found or not good or mentions(schema, CLOSED), value
