"""How the two processes talk: frames of a kind (one byte), a length (eight bytes) and UTF-8."""

from __future__ import annotations

from typing import BinaryIO, Final

VOCABULARY: Final = b"v"
GRAMMAR: Final = b"g"
TAG: Final = b"t"
VALIDATE: Final = b"j"
ANSWER: Final = b"a"
REFUSAL: Final = b"r"


def send(pipe: BinaryIO, kind: bytes, text: str) -> None:
    """Write one frame."""
    data = text.encode()
    pipe.write(kind + len(data).to_bytes(8, "little") + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> tuple[bytes, str] | None:
    """Read one frame; None where the other side has gone."""
    head = pipe.read(9)
    if len(head) < 9:
        return None
    size = int.from_bytes(head[1:], "little")
    data = pipe.read(size)
    return (head[:1], data.decode()) if len(data) == size else None
