"""An answer that a grammar holds to JSON: reasoning up to its mark, and then content alone.

Where you are: in place of a format's own parser, which looks for its marks in all of the text. In
JSON a mark that is spelled out is part of a string; taken out, the value would be another one.
"""

from __future__ import annotations

from deepinfer.chat.interface import ChatPiece


class JSONAnswerParser:
    """A parser for one answer.

    Args:
        mark: what ends the reasoning; empty where the answer begins without any.
    """

    finish_reason: str | None = None

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""
        """The end of the reasoning so far, which may be the beginning of the mark."""

    def feed(self, text: str) -> list[ChatPiece]:
        if not self._mark:
            return _pieces("", text)
        thought, found, content = (self._held + text).partition(self._mark)
        if found:
            self._mark = self._held = ""
            return _pieces(thought, content)
        most = min(len(thought), len(self._mark) - 1)
        kept = next((n for n in range(most, 0, -1) if self._mark.startswith(thought[-n:])), 0)
        self._held = thought[len(thought) - kept :]
        return _pieces(thought[: len(thought) - kept], "")

    def finish(self, reason: str) -> list[ChatPiece]:
        held, self._held = self._held, ""
        return _pieces(held, "")


def _pieces(reasoning: str, content: str) -> list[ChatPiece]:
    thoughts = [ChatPiece("reasoning", reasoning)] if reasoning else []
    return [*thoughts, ChatPiece("content", content)] if content else thoughts
