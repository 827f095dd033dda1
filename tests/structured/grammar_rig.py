"""Grammars over small vocabularies, and matchers to compare them with."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import regex
from deepinfer.api.grammar import GrammarContext
from deepinfer.sampling_params import StructuredSpec
from deepinfer.testing.naive import ends_of
from deepinfer.testing.scenarios import Grammars
from deepinfer.testing.toy import ToyTokenizer
from deepinfer_structured.backend import XGrammarBackend

PATTERNS = (
    "(ab|ca|é|€)+",
    "a[abc]{2,5}x?",
    "(a|ab)(c|bca)*\n",
    "[abcx ]{3,12}",
    "(é| c)*ab",
    "(abc|€){2,3}",
    "(a|b|ab|ba)*x",
    "((a|b)c?){1,4}( c)?",
)


class ToyVocabulary(ToyTokenizer):
    """The toy's tokens, repeated up to a size."""

    name = "toy"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def token_to_id(self, token: str) -> int | None:
        return 0 if token == "<end>" else None


OPEN: list[XGrammarBackend] = []


def backend_for(tokenizer, size=None, eos=frozenset({0}), folder=None, **options):
    """A backend over a tokenizer."""
    context = GrammarContext(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size if size is None else size,
        eos_ids=eos,
        options=options,
        cache_dir=Path(folder or "/nowhere"),
    )
    OPEN.append(XGrammarBackend(context))
    return OPEN[-1]


def spec(kind, rule=None, **more):
    return StructuredSpec(schema_type=kind, schema=rule, **more)


def allowed(row, size):
    """The ids of a mask's row."""
    bits = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:size]).tolist()


class RegexOracle:
    """Which tokens may follow by a pattern, found by partial matching of the whole text."""

    def __init__(self, pattern: str, tokens: list[bytes], ends: frozenset[int]) -> None:
        self.pattern = regex.compile(pattern.encode())
        self.tokens, self.ends = tokens, ends
        self.text, self.ended = b"", False

    def _viable(self, text: bytes) -> bool:
        return self.pattern.fullmatch(text, partial=True) is not None

    def _legal(self) -> list[int]:
        return [i for i, t in enumerate(self.tokens) if t and self._viable(self.text + t)]

    def complete(self) -> bool:
        return self.pattern.fullmatch(self.text) is not None

    def mask(self) -> np.ndarray:
        found = np.zeros(len(self.tokens), bool)
        found[self._legal()] = True
        if self.complete():
            found[[i for i in self.ends if i < len(found)]] = True
        return found

    def advance(self, token: int) -> bool:
        if token in self.ends and self.complete():
            self.ended = True
            return True
        self.text += self.tokens[token]
        return bool(self.tokens[token]) and self._viable(self.text)

    def done(self) -> bool:
        return self.ended or (self.complete() and not self._legal())


@functools.cache
def toy_backend(size):
    """Shared by all scenarios of a size, as an engine's requests share it."""
    return _Shared(backend_for(ToyVocabulary(size)))


class _Shared:
    """Survives the engines that use it."""

    def __init__(self, inner):
        self.check, self.ready = inner.check, inner.ready
        self.compile, self.fill = inner.compile, inner.fill

    def close(self):
        pass


class AfterMark:
    """Anything but an end until the mark has come, then the inner oracle's word."""

    def __init__(self, inner, mark):
        self.inner, self.mark, self.ids = inner, mark, ()

    def _over(self):
        return self.ids[-len(self.mark) :] == self.mark

    def mask(self):
        if self._over():
            return self.inner.mask()
        found = np.ones(len(self.inner.tokens), bool)
        found[[i for i in self.inner.ends if i < len(found)]] = False
        return found

    def advance(self, token):
        if self._over():
            return self.inner.advance(token)
        self.ids += (token,)
        return token not in self.inner.ends

    def done(self):
        return self._over() and self.inner.done()


def toy_oracle(request, size):
    pieces = ToyVocabulary(size)
    tokens = [b"", *(pieces.token_bytes(i) for i in range(1, size))]
    inner = RegexOracle(request.structured.rule, tokens, ends_of(request))
    return AfterMark(inner, request.reasoning_end) if request.reasoning_end else inner


def pattern_grammars():
    """Three requests in four are constrained by a pattern."""
    specs = tuple(spec("regex", pattern) for pattern in PATTERNS)
    return Grammars(specs, toy_backend, toy_oracle, 0.75, reasoning=0.2)


def random_text(oracle, seed, most=40):
    """Ids along a random walk through what an oracle allows, to its end or a dead end."""
    draw, ids = random.Random(seed), []
    while len(ids) < most and not oracle.done() and oracle.mask().any():
        ids.append(draw.choice(np.flatnonzero(oracle.mask()).tolist()))
        assert oracle.advance(ids[-1])
    return ids
