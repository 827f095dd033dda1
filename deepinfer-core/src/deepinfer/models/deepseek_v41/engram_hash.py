"""The constants behind Engram's row ids: compressed tokens, primes, offsets, multipliers.

All follow from the configuration and the tokenizer's file; nothing of them is in the checkpoint.
Specification, sections 5.1 and 5.2. ``ops.engram_rows`` uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.errors import ModelLoadError
from deepinfer.ops.reference.engram import EngramHash

_RELEASED_TOKENS: Final = 99092
_RELEASED: Final = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
"""Multipliers of the released model. They are drawn below, by a generator whose stream its makers
may change; the model may not change with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramShape:
    """What config.json says of Engram.

    ``layers``: ids of the layers that have a table, of ``rows`` rows each; N-grams have 2 …
    ``max_ngram`` tokens and ``heads`` hashes each; primes are looked for from ``vocab_size`` on.
    ``compressed_tokens``: distinct compressed ids; ``pad_token``: the token that stands for what is
    out of reach.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    max_ngram: int
    heads: int
    vocab_size: int
    compressed_tokens: int
    pad_token: int

    @property
    def columns(self) -> int:
        """Rows that a token reads of each table."""
        return (self.max_ngram - 1) * self.heads


def hash_constants(shape: EngramShape, token_map: Tensor, image: int = -1) -> EngramHash:
    """Everything that ``engram_rows`` reads; ``image``: the token id of image spans, −1 if none.

    Raises:
        ModelLoadError: config.json's rows or compressed tokens are not what follows from the rest.
    """
    found = int(token_map.max()) + 1
    if found != shape.compressed_tokens:
        raise ModelLoadError(
            f"The tokenizer has {found} tokens that Engram tells apart; the model's config.json "
            f"says {shape.compressed_tokens}.",
            setting="engram_compressed_vocab_size",
            next_step="The tokenizer may belong to another model.",
        )
    primes = bucket_primes(shape)
    sizes = primes.flatten(1).sum(1).tolist()
    if sizes != list(shape.rows):
        raise ModelLoadError(
            f"Engram's tables need {sizes} rows; the model's config.json says {list(shape.rows)}.",
            setting="engram_num_embeddings",
        )
    multipliers = [layer_multipliers(shape, layer) for layer in shape.layers]
    return EngramHash(
        token_map=token_map,
        multipliers=torch.tensor(multipliers),
        primes=primes,
        offsets=bucket_offsets(primes),
        pad=int(token_map[shape.pad_token]),
        image=image,
    )


def bucket_primes(shape: EngramShape) -> Tensor:
    """int64[L, N−1, heads]: successive primes from ``vocab_size`` on; none is used twice."""
    size = (len(shape.layers), shape.max_ngram - 1, shape.heads)
    found = list(islice(_primes(shape.vocab_size), int(np.prod(size))))
    return torch.tensor(found, dtype=torch.int64).view(size)


def bucket_offsets(primes: Tensor) -> Tensor:
    """int64[L, (N−1)·heads]: where each bucket begins in its layer's table."""
    flat = primes.flatten(1)
    return flat.cumsum(1) - flat


def layer_multipliers(shape: EngramShape, layer: int) -> tuple[int, ...]:
    """N odd numbers, small enough that a product with a compressed id stays below 2^63."""
    if shape.compressed_tokens == _RELEASED_TOKENS and shape.max_ngram == 4 and layer in _RELEASED:
        return _RELEASED[layer]
    return drawn_multipliers(shape.compressed_tokens, shape.max_ngram, layer)


def drawn_multipliers(compressed_tokens: int, count: int, layer: int) -> tuple[int, ...]:
    """:func:`layer_multipliers` from the generator."""
    bound = max(1, (2**63 - 1) // compressed_tokens // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(int(draw) * 2 + 1 for draw in draws)


def token_map(tokenizer: Path, vocab_size: int) -> Tensor:
    """int64[vocab_size]: compressed id of each token, by a ``tokenizer.json``.

    Tokens that read alike but for case, accents, width and the amount of white space share an id;
    ids are numbered in order of first appearance. Takes about two seconds at 129280 tokens.
    """
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(tokenizer))
    texts = [read.decode([i], skip_special_tokens=False) for i in range(vocab_size)]
    folded = _fold(texts)
    numbers: dict[str, int] = {}
    ids = []
    for token, (text, key) in enumerate(zip(texts, folded, strict=True)):
        if "�" in text:  # part of a character: no text of its own
            key = read.id_to_token(token) or text
        ids.append(numbers.setdefault(key or text, len(numbers)))
    return torch.tensor(ids, dtype=torch.int64)


def _fold(texts: list[str]) -> Iterator[str]:
    """Texts without case, accents, width and surrounding space; a lone space stays."""
    from tokenizers import Regex, normalizers

    lone = "\ue000"  # stands for a text that is one space, which stripping would take
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), lone),
            normalizers.Strip(),
            normalizers.Replace(lone, " "),
        ]
    )
    return map(fold.normalize_str, texts)


def _primes(begin: int) -> Iterator[int]:
    """Primes from ``begin`` on, ascending."""
    number = max(begin, 2)
    while True:
        if all(number % d for d in range(2, int(number**0.5) + 1)):
            yield number
        number += 1
