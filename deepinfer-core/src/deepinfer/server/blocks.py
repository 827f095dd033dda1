"""An answer as blocks: reasoning, text, one for each call. Opened, continued and closed in order.

Where you are: under ``messages`` and ``responses``, whose streams are made of such blocks. A whole
answer is the same with everything in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.chat.interface import ChatPiece

if TYPE_CHECKING:
    from deepinfer.entrypoints.outputs import CompletionOutput


def pieces_of(out: CompletionOutput) -> Iterator[ChatPiece]:
    """What an output holds, in the order in which models say it."""
    message = out.message
    if message is None:
        if out.text:
            yield ChatPiece("content", out.text)
        return
    if message.reasoning_content:
        yield ChatPiece("reasoning", message.reasoning_content)
    if message.content:
        yield ChatPiece("content", message.content)
    for call in message.tool_calls:
        yield ChatPiece("tool_call", call.arguments, call.index, call.id, call.name)


@dataclass(slots=True)
class Block:
    """One part of an answer; ``text`` is all of it so far. ``kind`` as of ``ChatPiece``."""

    index: int
    kind: str
    call: int = 0
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)


class Blocks:
    """Sorts pieces into blocks."""

    def __init__(self) -> None:
        self.done: list[Block] = []
        self._open: Block | None = None

    def feed(self, piece: ChatPiece) -> tuple[Block | None, Block, bool]:
        """(the block that this closes, the one it belongs to, whether that one is new)."""
        block, closed = self._open, None
        fresh = block is None or (block.kind, block.call) != (piece.kind, piece.call)
        if fresh:
            closed = self.close()
            index = len(self.done)
            block = Block(index, piece.kind, piece.call, piece.id, piece.name)
            self._open = block
        assert block is not None
        block.parts.append(piece.text)
        return closed, block, fresh

    def close(self) -> Block | None:
        """End the one that is open, if one is."""
        block, self._open = self._open, None
        if block is not None:
            self.done.append(block)
        return block
