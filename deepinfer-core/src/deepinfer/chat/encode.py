"""A rendered conversation to ids.

Text between special ranges is a user's or a tool's: whatever it spells, it becomes plain tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deepinfer.chat.interface import RenderedChat
from deepinfer.errors import TokenizerError

if TYPE_CHECKING:
    from deepinfer.tokenizer import Tokenizer


def prompt_ids(
    rendered: RenderedChat, tokenizer: Tokenizer, image_tokens: Sequence[int] = ()
) -> list[int]:
    """The ids of a prompt.

    Args:
        rendered: what a chat format made.
        tokenizer: the model's.
        image_tokens: how many positions each image takes; its placeholder's id fills them all.

    Raises:
        TokenizerError: the vocabulary lacks a special token of the format.
    """
    if rendered.special_ranges is None:
        return tokenizer.encode(rendered.text, add_special_tokens=False)
    assert len(image_tokens) == len(rendered.images), "one count for each image"
    counts = iter(image_tokens)
    ids: list[int] = []
    for text, special in _segments(rendered.text, rendered.special_ranges):
        if not special:
            ids.extend(tokenizer.encode_plain(text))
        elif text == rendered.image_token:
            ids.extend([_special_id(tokenizer, text)] * next(counts))
        else:
            ids.append(_special_id(tokenizer, text))
    return ids


def _segments(text: str, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """The text in order, and of each piece whether it is a special token."""
    done = 0
    for start, end in ranges:
        if start > done:
            yield text[done:start], False
        yield text[start:end], True
        done = end
    if done < len(text):
        yield text[done:], False


def _special_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise TokenizerError(
            f"The vocabulary of {tokenizer.name} has no token {token!r}, which its chat format "
            "needs.",
            setting="tokenizer",
        )
    return found
