"""Text from tokens as they come.

Where you are: the output side of the engine; ``output.py`` pushes the ids of each step and sends
on what ``push`` returns. Text is never taken back: bytes that may still become a character are
held until they do. Cost is constant per token, because the state is a few bytes and no text is
decoded twice. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

# Decoders that are not byte streams are decoded in a window; a window that yields nothing for
# this many tokens is flushed, so that the cost per token stays bounded.
_WINDOW: Final = 8
# Tokens joined at a time, so that a long broken output costs linear time.
_SLICE: Final = 256


class TokenText(Protocol):
    """What the detokenizer asks of a tokenizer; ``deepinfer.tokenizer.Tokenizer`` has it all."""

    @property
    def text_kind(self) -> str:
        """``byte_level``, ``byte_fallback`` or ``other``."""
        ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """The text of one sequence.

    All pushes and the final ``finish`` together are what ``decode`` makes of the output as the
    continuation of the prompt. One exception: a run of byte-fallback tokens that is partly broken
    keeps its good characters here, while ``decode`` replaces the whole run.

    Args:
        tokenizer: the vocabulary.
        prompt_ids: what stands before the output; only its end is looked at.
        skip_special_tokens: leave special tokens out.
        spaces_between_special_tokens: accepted for compatibility; the vocabulary's own decoder
            decides about spaces, so neither value changes the text.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        stream = _WindowStream if tokenizer.text_kind == "other" else _ByteStream
        self._stream: _ByteStream | _WindowStream = stream(
            tokenizer, prompt_ids, skip_special_tokens
        )

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is now certain."""
        return self._stream.push(ids)

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character are U+FFFD."""
        return self._stream.finish()

    def overdue(self) -> str:
        """Text that is certain and was not returned."""
        return ""


class LateDetokenizer(IncrementalDetokenizer):
    """The same text, all of it with the end: nobody reads it before, and making it piece by piece
    is a third of what the host does for a step of many rows. For vocabularies of bytes, whose text
    does not depend on the pieces.
    """

    def __init__(self, tokenizer: TokenText, *rest: Any) -> None:
        super().__init__(tokenizer, *rest)
        self._ids: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        self._ids.extend(ids)
        return ""

    def finish(self) -> str:
        return self.overdue() + super().finish()

    def overdue(self) -> str:
        ids, self._ids = self._ids, []
        return super().push(ids)


class _ByteStream:
    """Vocabularies whose text is the concatenation of their tokens' bytes."""

    def __init__(self, tokenizer: TokenText, prompt_ids: Sequence[int], skip: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip else frozenset()
        self._per_byte = tokenizer.text_kind == "byte_fallback"
        tail = self._tail(prompt_ids)
        self._at_start = tokenizer.strips_first_space and not tail
        self._held = _incomplete(tail)
        self._foreign = len(self._held)  # bytes of the prompt; only a whole character shows them

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough to see a character that it leaves open."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 4:
                break
            if token_id not in self._skipped:
                tail = self._token_bytes(token_id) + tail
        return tail

    def push(self, ids: Iterable[int]) -> str:
        pieces = [self._token_bytes(i) for i in ids if i not in self._skipped]
        parts = []
        for first in range(0, len(pieces), _SLICE):
            data = b"".join(pieces[first : first + _SLICE])
            if self._at_start and data:
                self._at_start = False
                data = data.removeprefix(b" ")
            parts.append(self._decode(self._held + data, final=False))
        return "".join(parts)

    def finish(self) -> str:
        return self._decode(self._held, final=True)

    def _decode(self, data: bytes, final: bool) -> str:
        """The characters of ``data``; what may still become one is held unless ``final``."""
        parts, start = [], 0
        while start < len(data):
            try:
                parts.append(data[start:].decode())
                start = len(data)
            except UnicodeDecodeError as why:
                bad, end = start + why.start, start + why.end
                parts.append(data[start:bad].decode())
                start = bad
                if why.reason == "unexpected end of data" and not final:
                    break
                parts.append("\ufffd" * self._lost(bad, end))
                start = end
        self._held = data[start:]
        if start > 0:
            self._foreign = 0
        return "".join(parts)

    def _lost(self, bad: int, end: int) -> int:
        """How many U+FFFD a broken stretch becomes, less those that are the prompt's."""
        foreign = self._foreign if bad == 0 else 0
        return end - bad - foreign if self._per_byte else 1 - min(foreign, 1)


class _WindowStream:
    """Any other vocabulary: decode a short window with and without the new tokens."""

    def __init__(self, tokenizer: TokenText, prompt_ids: Sequence[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._window = list(prompt_ids[-_WINDOW:])
        self._read = len(self._window)

    def push(self, ids: Iterable[int]) -> str:
        parts = []
        for token_id in ids:
            self._window.append(token_id)
            parts.append(self._advance(final=False))
        return "".join(parts)

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._read], self._skip)
        after = self._tokenizer.decode(self._window, self._skip)
        waits = len(after) <= len(before) or after.endswith("\ufffd")
        if waits and not final and len(self._window) - self._read < _WINDOW:
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]


def _incomplete(data: bytes) -> bytes:
    """The trailing bytes that are the beginning of a character."""
    for length in range(1, min(3, len(data)) + 1):
        tail = data[-length:]
        try:
            tail.decode()
        except UnicodeDecodeError as why:
            if why.start == 0 and why.reason == "unexpected end of data" and why.end == length:
                return tail
    return b""
