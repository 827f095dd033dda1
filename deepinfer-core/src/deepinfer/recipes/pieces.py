"""Long documents in pieces: at paragraphs if they fit, else at sentences, else at words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

_BORDERS: Final = (re.compile(r"\n\s*\n"), re.compile(r"(?<=[.!?…。！？])\s+"), re.compile(r"\s+"))


def words(text: str) -> int:
    """How many words a text has."""
    return len(text.split())


def pieces(text: str, most: int) -> list[str]:
    """Pieces of at most ``most`` words each that join to the text, borders aside."""
    return list(_packed(_split(text.strip(), most, _BORDERS), most))


def _split(text: str, most: int, borders: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Parts that fit, each with the white space behind it."""
    if words(text) <= most:
        yield text
        return
    border, *finer = borders
    cuts = [0, *(m.end() for m in border.finditer(text)), len(text)]
    for one, two in pairwise(cuts):
        if one < two:
            yield from _split(text[one:two], most, finer) if finer else iter([text[one:two]])


def _packed(parts: Iterator[str], most: int) -> Iterator[str]:
    held, size = "", 0
    for part in parts:
        count = words(part)
        if held and size + count > most:
            yield held.strip()
            held, size = "", 0
        held, size = held + part, size + count
    if held.strip():
        yield held.strip()
