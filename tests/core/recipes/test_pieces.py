"""Long documents in pieces: nothing is lost, nothing is longer than allowed."""

import re
from itertools import pairwise

import pytest
from deepinfer.recipes.pieces import pieces, words
from hypothesis import given
from hypothesis import strategies as st

TEXTS = st.text(alphabet="ab .!\n\tñ。", max_size=200)


@given(TEXTS, st.integers(1, 12))
def test_pieces_keep_every_character_and_the_bound(text, most):
    found = pieces(text, most)
    assert re.sub(r"\s", "", "".join(found)) == re.sub(r"\s", "", text)
    assert all(1 <= words(piece) <= most for piece in found)


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("One two. Three four.", 10, ["One two. Three four."]),
        ("One two. Three four.", 2, ["One two.", "Three four."]),
        (
            "One two. Three four.\n\nFive six. Seven.",
            4,
            ["One two. Three four.", "Five six. Seven."],
        ),
        ("one two three four five", 2, ["one two", "three four", "five"]),
        (" \n ", 3, []),
    ],
)
def test_borders_are_paragraphs_then_sentences_then_words(text, most, expected):
    assert pieces(text, most) == expected


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(4, 9))
def test_no_two_neighbours_would_fit_in_one_piece(lengths, most):
    text = "\n\n".join(" ".join(["w"] * n) for n in lengths)
    found = pieces(text, most)
    assert all(words(a) + words(b) > most for a, b in pairwise(found))
