"""What xgrammar must know of a model's vocabulary: :class:`Vocabulary`.

Special tokens are spelt in bytes that are no UTF-8, so no grammar of texts can allow them, and only
a structural tag that names one does; ids of the logits that the tokenizer does not have (padding,
images) have no text at all and are never allowed. The ids that end a text are not told to
xgrammar at all: which ones they are is a matter of the request (``matcher.py``).
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

from deepinfer.errors import InvalidRequestError


class Vocabulary:
    """A tokenizer's tokens as bytes. Cheap to make; the bytes are read at first use.

    Args:
        tokenizer: the model's, or None.
        size: columns of the logits.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.size = size
        self._tokenizer = tokenizer

    def check(self) -> None:
        """Refuse structured output where nobody knows what the ids spell."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                "Structured output needs the model's tokenizer, and this engine has none.",
                setting="so_args",
                next_step="Load the model with its tokenizer.",
            )

    @cached_property
    def tokens(self) -> list[bytes]:
        """What each id adds to a text; empty for an id that no text may contain."""
        self.check()
        known = self._tokenizer
        plain = [b""] * self.size
        for token in range(min(self.size, known.vocab_size)):
            if token in known.special_ids:
                plain[token] = b"\xff<%d>" % token
            else:
                plain[token] = known.token_bytes(token)
        if known.text_kind == "other":  # broken characters were decoded to U+FFFD
            plain = [b"" if b"\xef\xbf\xbd" in text else text for text in plain]
        return plain

    @property
    def special(self) -> frozenset[int]:
        """The ids of special tokens."""
        found: frozenset[int] = self._tokenizer.special_ids
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Equal for vocabularies that spell the same."""
        digest = hashlib.sha256(str(self.size).encode())
        for text in self.tokens:
            digest.update(len(text).to_bytes(4, "little") + text)
        return digest.hexdigest()

    @cached_property
    def info(self) -> Any:
        """As ``xgrammar.TokenizerInfo``; several threads may make it twice, which is harmless."""
        import xgrammar

        return xgrammar.TokenizerInfo(
            self.tokens,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self.size,
            stop_token_ids=[],
            add_prefix_space=False,
        )

    def id_of(self, token: str) -> int | None:
        """The id that the tokenizer spells so; special tokens too."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found
