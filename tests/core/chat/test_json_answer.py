"""Answers that are JSON: reasoning, its mark, content; however the text is cut."""

import pytest
from deepinfer.chat.interface import MessageBuilder
from deepinfer.chat.json_answer import JSONAnswerParser
from hypothesis import given
from hypothesis import strategies as st

MARK = "</think>"


def read(mark, pieces):
    parser, message = JSONAnswerParser(mark), MessageBuilder()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish("stop"))
    found = message.message()
    assert parser.finish_reason is None and found.tool_calls == ()
    return found.reasoning_content, found.content


CASES = [
    (MARK, "a thought</think>{}", ("a thought", "{}")),
    (MARK, "</think>{}", (None, "{}")),
    (MARK, '<</think>"</think>"', ("<", '"</think>"')),
    (MARK, "</thin</think>1", ("</thin", "1")),
    (MARK, "cut off </thi", ("cut off </thi", None)),
    (MARK, "</think>", (None, None)),
    ("", '{"a": "</think>"}', (None, '{"a": "</think>"}')),
    ("aab", "aaab1", ("a", "1")),
]


@pytest.mark.parametrize("mark, text, parts", CASES)
def test_an_answer_in_one_piece_and_in_single_characters(mark, text, parts):
    assert read(mark, [text]) == parts
    assert read(mark, list(text)) == parts


@given(st.lists(st.sampled_from(["a", "ab", "b", "ba", "c", ""]), max_size=12))
def test_cuts_do_not_show(pieces):
    for mark in ("ab", "aab", "abab"):
        thought, _, content = "".join(pieces).partition(mark)
        assert read(mark, pieces) == (thought or None, content or None)
