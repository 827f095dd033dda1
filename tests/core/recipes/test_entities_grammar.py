"""Every answer that the entity grammar allows can be placed in its text."""

import json
import random
from itertools import pairwise

import pytest
from deepinfer.recipes import NamedEntities
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("xgrammar")
from walks import compiled, walk

LETTERS = [chr(c) for c in range(32, 127)] + list("„“ñ")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="Abñ .,\n'\"\\„“[}", min_size=1, max_size=60), st.integers(0, 1 << 30))
def test_random_answers_stand_in_the_text_in_order_and_apart(text, seed):
    recipe = NamedEntities(types=("person", 'a "b"'), max_words=3, chunk_words=5)
    asks = recipe.parts(text)
    rng = random.Random(seed)
    answers = [json.loads(walk(compiled(a.so_args["schema"], LETTERS), LETTERS, rng)) for a in asks]
    value = recipe.merge(text, answers)
    assert len(value) == sum(len(answer["entities"]) for answer in answers)
    assert all(text[e["start"] : e["end"]] == e["text"] for e in value)
    assert all(e["type"] in recipe.types and 1 <= len(e["text"].split()) <= 3 for e in value)
    places = [(e["start"], e["end"]) for e in value]
    assert places == sorted(places)
    assert all(a[1] <= b[0] for a, b in pairwise(places))


def test_a_text_without_words_has_no_entities():
    (ask,) = NamedEntities().parts("... !")
    assert walk(compiled(ask.so_args["schema"], LETTERS), LETTERS, random.Random(0)) == (
        '{"entities": []}'
    )
