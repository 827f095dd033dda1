"""Named entities: which names of which types a text holds, and where.

The grammar of an answer lists the text's own runs of words, so an entity that is not in the text
cannot be written; long texts go in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from pydantic import Field

from deepinfer.recipes.interface import Ask, Options, json_answer, told
from deepinfer.recipes.pieces import pieces

_WORD: Final = re.compile(r"\S+")
_EDGES: Final = "\"'`.,;:!?()[]{}<>«»“”‘’„…-–—*_"


class NamedEntities(Options):
    """Finds named entities. The value is a list of ``{"text", "type", "start", "end"}``.

    ``start`` and ``end`` are character positions of the first occurrence; an entity that the model
    names twice is listed once.

    Args:
        types: of entities.
        instructions: what the types mean, in your words.
        max_words: the longest entity.
        max_entities: the most that one piece may give.
        chunk_words: the longest piece of a document that is asked about at once.
    """

    name: ClassVar[str] = "ner"

    types: tuple[str, ...] = Field(default=("person", "organization", "location"), min_length=1)
    instructions: str = ""
    max_words: int = Field(default=4, ge=1, le=12)
    max_entities: int = Field(default=12, ge=1, le=256)
    chunk_words: int = Field(default=120, ge=1, le=400)

    def parts(self, text: str) -> Sequence[Ask]:
        """A question for each piece."""
        return [
            Ask(told(self._system(), piece), json_answer(self._schema(piece)), piece)
            for piece in pieces(text, self.chunk_words)
        ]

    def merge(self, text: str, answers: Sequence[Any]) -> list[dict[str, Any]]:
        """All entities in the order of their places, each once."""
        found = {(e["text"], e["type"]): None for answer in answers for e in answer["entities"]}
        placed = [
            {"text": entity, "type": kind, "start": at, "end": at + len(entity)}
            for entity, kind in found
            if (at := text.find(entity)) >= 0
        ]
        return sorted(placed, key=lambda e: (e["start"], e["end"], e["type"]))

    def _schema(self, piece: str) -> dict[str, Any]:
        runs = sorted(set(_runs(piece, self.max_words)))
        entity = {
            "type": "object",
            "properties": {"text": {"enum": runs}, "type": {"enum": list(self.types)}},
            "required": ["text", "type"],
            "additionalProperties": False,
        }
        most = self.max_entities if runs else 0
        return {
            "type": "object",
            "properties": {
                "entities": {"type": "array", "items": entity if runs else {}, "maxItems": most}
            },
            "required": ["entities"],
            "additionalProperties": False,
        }

    def _system(self) -> str:
        more = f" {self.instructions}" if self.instructions else ""
        return (
            "List the named entities of the text that follows, each once. "
            f"Types: {', '.join(self.types)}.{more} Answer in JSON."
        )


def _runs(text: str, most: int) -> Iterator[str]:
    """Runs of up to ``most`` words of one line, without the marks around them."""
    for line in text.splitlines():
        spans = [match.span() for match in _WORD.finditer(line)]
        for first, (start, _) in enumerate(spans):
            for _, end in spans[first : first + most]:
                run = line[start:end].strip(_EDGES + " \t\xa0")
                if any(c.isalnum() for c in run):
                    yield run
