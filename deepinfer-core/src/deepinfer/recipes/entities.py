"""Named entities: which names of which types a text holds, and where.

The grammar of an answer walks through the text: entities are runs of its words, in their order, and
none overlaps another. So what is not in the text cannot be written, and nothing twice. Long texts
go in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from pydantic import Field

from deepinfer.recipes.interface import Ask, Options, Texts, told
from deepinfer.recipes.pieces import pieces

_WORD: Final = re.compile(r"\S+")
_EXAMPLES: Final = (
    (
        "Last spring Maria Lopez left Madrid. She works for Siemens in Berlin now.",
        (
            ("Maria Lopez", "person"),
            ("Madrid", "location"),
            ("Madrid", "place"),
            ("Siemens", "organization"),
            ("Berlin", "location"),
            ("Berlin", "place"),
        ),
    ),
    ("It took 40 minutes and 3 eggs.", ()),
    ("Tom has 5 coins. Tom buys 2 more.", (("Tom", "person"),)),
)
_EDGES: Final = "\"'`.,;:!?()[]{}<>«»“”‘’„…-–—*_ \t\xa0"


class NamedEntities(Options):
    """Finds named entities. The value is a list of ``{"text", "type", "start", "end"}``.

    ``start`` and ``end`` are positions of characters in the text.

    Args:
        types: of entities.
        instructions: what the types mean, in your words.
        examples: (text, [(entity, type), …]) pairs that are shown to the model first; None shows
            some of ours, as far as they know the types.
        max_words: the longest entity.
        chunk_words: the longest piece of a document that is asked about at once.
    """

    name: ClassVar[str] = "ner"

    types: Texts = Field(default=("person", "organization", "location"), min_length=1)
    instructions: str = ""
    examples: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] | None = None
    max_words: int = Field(default=4, ge=1, le=12)
    chunk_words: int = Field(default=120, ge=1, le=400)

    def parts(self, text: str) -> Sequence[Ask]:
        """A question for each piece."""
        return [
            Ask(
                told(self._system(), piece, self._shown()),
                {"schema_type": "ebnf", "schema": rule},
                piece,
            )
            for piece in pieces(text, self.chunk_words)
            for rule in [grammar(piece, self.types, self.max_words)]
        ]

    def merge(self, text: str, answers: Sequence[Any]) -> list[dict[str, Any]]:
        """All entities with their places: answers are in the text's order, so each search begins
        where the last one ended.
        """
        found, at = [], 0
        for entity in (entity for answer in answers for entity in answer["entities"]):
            start = text.index(entity["text"], at)
            at = start + len(entity["text"])
            found.append({**entity, "start": start, "end": at})
        return found

    def _shown(self) -> list[tuple[str, Any]]:
        ours = [(text, [e for e in names if e[1] in self.types]) for text, names in _EXAMPLES]
        given = ours if any(names for _, names in ours) else []
        if self.examples is not None:
            given = [(text, list(names)) for text, names in self.examples]
        return [
            (text, {"entities": [{"text": name, "type": kind} for name, kind in names]})
            for text, names in given
        ]

    def _system(self) -> str:
        more = f" {self.instructions}" if self.instructions else ""
        return (
            "List the named entities of the text that follows, in their order, each once. "
            f"Types: {', '.join(self.types)}.{more} Answer in JSON."
        )


def grammar(text: str, types: Sequence[str], most: int) -> str:
    """EBNF of ``{"entities": [{"text": …, "type": …}, …]}`` over runs of up to ``most`` words.

    ``n<i>`` is what may come from word i on; ``r<i>`` ends the list or goes on there.
    """
    starts = _runs(text, most)
    kinds = " | ".join(_quoted(json.dumps(kind, ensure_ascii=False)) for kind in types)
    rules = [
        f'root ::= "{{\\"entities\\": [" {"n0?" if starts else ""} "]}}"',
        f'kind ::= ", \\"type\\": " ({kinds}) "}}"',
    ]
    for i, runs in enumerate(starts):
        ways = [f"{_quoted(_opening(run))} kind r{i + length}" for run, length in runs]
        ways += [f"n{i + 1}"] * (i + 1 < len(starts))
        rules.append(f"n{i} ::= {' | '.join(ways)}")
        rules.append(f'r{i} ::= (", " n{i})?')
    rules.append(f'r{len(starts)} ::= ""')
    return "\n".join(rules)


def _opening(run: str) -> str:
    return '{"text": ' + json.dumps(run, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _runs(text: str, most: int) -> list[list[tuple[str, int]]]:
    """For each word that holds a letter or digit: the runs that begin there, and how many such
    words each takes. A run stays on its line; marks around it are left off.
    """
    starts: list[list[tuple[str, int]]] = []
    for line in text.splitlines():
        spans = [m.span() for m in _WORD.finditer(line) if any(map(str.isalnum, m.group()))]
        for first, (start, _) in enumerate(spans):
            ends = spans[first : first + most]
            starts.append(
                [(line[start:end].strip(_EDGES), n) for n, (_, end) in enumerate(ends, 1)]
            )
    return starts
