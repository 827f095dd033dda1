"""Toys for the brain's tests: a model, a tokenizer, a grammar and a KV tier, all without torch.

The model is plain functions of one text, so that a naive loop can use them too: an entry of KV
depends on every entry before it, logits on a summary of all of them, a draw on (logits, seed,
position).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.api.grammar import MaskJob
from deepinfer.api.kv import Lookup, PageKey
from deepinfer.api.plan import RowParams
from deepinfer.errors import UnsupportedError

M64 = (1 << 64) - 1
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
Floats = NDArray[np.float64]


def entry(summary: int, token: int, position: int) -> int:
    """The KV entry of a token after everything that ``summary`` sums up."""
    x = ((summary ^ (token * 0x9E3779B97F4A7C15)) + position * 0xD1B54A32D192ED03) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    return x ^ (x >> 27)


def attend(summary: int, kv: int, position: int) -> int:
    """The summary with one more entry."""
    return (summary + kv * (2 * position + 1)) & M64


class Text(Protocol):
    """A model on one text, row by row."""

    def push(self, token: int) -> int:
        """Run one more token: what its logits are made of."""
        ...


class PlainText:
    """A running sum of all entries: a :class:`Text`."""

    def __init__(self) -> None:
        self.summary = 0
        self.length = 0

    def push(self, token: int) -> int:
        """Run one more token."""
        value = entry(self.summary, token, self.length)
        self.summary = attend(self.summary, value, self.length)
        self.length += 1
        return self.summary


def _uniform(x: int, vocab: int) -> Floats:
    """``vocab`` numbers in (0, 1) that depend on x."""
    h = (np.arange(1, vocab + 1, dtype=np.uint64) * _SPREAD) ^ np.uint64(x)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Floats = ((h >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return result


def toy_logits(summary: int, vocab: int) -> Floats:
    """The model: logits from a summary of all entries read."""
    return _uniform(summary, vocab) * 6.0


def process(
    logits: Floats, tokens: Sequence[int], params: RowParams, mask: NDArray[np.bool_] | None
) -> Floats:
    """Bias, presence penalty, allowed ids, minimum length, mask: what needs the brain."""
    z = logits.copy()
    for token, bias in params.logit_bias:
        z[token] += bias
    if params.presence_penalty:
        z[list(set(tokens[params.prompt_len :]))] -= params.presence_penalty
    if params.allowed_token_ids is not None:
        keep = np.zeros(len(z), bool)
        keep[list(params.allowed_token_ids)] = True
        z[~keep] = -np.inf
    if len(tokens) < params.min_len:
        z[list(params.stop_ids)] = -np.inf
    if mask is not None:
        z[~mask] = -np.inf
    return z


def draw(z: Floats, seed: int, position: int, temperature: float) -> int:
    """The sampler: counter noise of (seed, absolute position, id); −1 if nothing is allowed."""
    if not np.isfinite(z).any():
        return -1
    if temperature > 0:
        u = _uniform(entry(seed, position, 7), len(z))
        z = z / temperature - np.log(-np.log(u))
    return int(np.argmax(z))


def candidates(logits: Floats, token: int, count: int) -> tuple[list[int], list[float], int]:
    """The token and the ``count`` best: ids, raw logprobs, the token's rank."""
    raw = logits - logits.max()
    raw = raw - np.log(np.exp(raw).sum())
    order = np.argsort(-raw, kind="stable")[:count].tolist()
    rank = 1 + int((raw > raw[token]).sum())
    return [token, *order], [float(raw[i]) for i in [token, *order]], rank


class ToyTokenizer:
    """Tokens that cut characters and stop strings in two; what the detokenizer asks for."""

    text_kind = "byte_level"
    strips_first_space = False
    special_ids = frozenset({0})
    pieces = (
        b"<end>",
        *(b"a", b"b", b"ab", b"ba", b" c", b"\n", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac"),
        *(b"cab", b"abc", b"bc", b"x", b" ", b"ca"),
    )
    whole = (1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id % len(self.pieces)] if token_id else self.pieces[0]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Greedy, longest piece first; enough for stop texts and bad words."""
        data, ids = text.encode(), []
        by_length = sorted(self.whole, key=lambda i: -len(self.pieces[i]))
        while data:
            ids.append(next(i for i in by_length if data.startswith(self.pieces[i])))
            data = data[len(self.pieces[ids[-1]]) :]
        return ids


class ToyGrammar:
    """An automaton modulo m: the state decides which ids may follow; the end only in state 0.

    ``LAST`` in the state m−1 closes the text: behind it nothing but the end may follow, so the text
    ends without one. ``ends``: the ids that end this text, allowed where it may end.
    """

    LAST = 3

    def __init__(self, modulus: int, vocab: int, ends: Collection[int] = frozenset({0})) -> None:
        self.modulus = modulus
        self.vocab = vocab
        self.ends = frozenset(ends)
        self.state: int | None = 1 % modulus

    def mask(self) -> NDArray[np.bool_]:
        """Which ids may come next."""
        allowed = np.zeros(self.vocab, bool)
        if self.state is not None:
            allowed = (np.arange(self.vocab) + self.state) % 3 != 0
            allowed[0] = False  # the special token
        if not self.state:
            allowed[[i for i in self.ends if i < self.vocab]] = True
        return allowed

    def advance(self, token: int) -> bool:
        """Move if the token is legal."""
        if not self.mask()[token]:
            return False
        state = self.state or 0
        closes = token in self.ends and state == 0
        closes = closes or (token == self.LAST and state == self.modulus - 1)
        self.state = None if closes or self.state is None else (state + token) % self.modulus
        return True

    def fill(self, rows: NDArray[np.int32], drafts: Sequence[int]) -> int:
        before, legal = self.state, 0
        rows[0] = packed(self.mask())
        for draft in drafts:
            if self.state is None or not self.advance(draft):
                break
            legal += 1
            rows[legal] = packed(self.mask())
        self.restore(before)
        return legal

    def restore(self, state: int | None) -> None:
        """Back to where ``fill`` began."""
        self.state = state

    def accept(self, tokens: Sequence[int]) -> int:
        for done, token in enumerate(tokens):
            if self.state is None:
                return done
            if not self.advance(token):
                raise AssertionError(f"the grammar refused the emitted token {token}")
        return len(tokens)

    def done(self) -> bool:
        return self.state is None

    def fork(self) -> ToyGrammar:
        twin = type(self)(self.modulus, self.vocab, self.ends)
        twin.state = self.state
        return twin

    def unproven(self) -> bool:
        return False

    def violation(self) -> str | None:
        return None


class ToyGrammarBackend:
    """Compiles a modulus; refuses one below 2 by name."""

    grammar = ToyGrammar

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self._compiled: set[int] = set()

    def check(self, spec: int) -> None:
        if spec < 2:
            raise UnsupportedError(f"modulus {spec} cannot be enforced.", setting="so_args")

    def ready(self, spec: int, ends: frozenset[int]) -> ToyGrammar | None:
        return self.grammar(spec, self.vocab, ends) if spec in self._compiled else None

    def compile(self, spec: int, ends: frozenset[int]) -> ToyGrammar:
        self.check(spec)
        self._compiled.add(spec)
        return self.grammar(spec, self.vocab, ends)

    def fill(self, jobs: Sequence[MaskJob], rows: NDArray[np.int32]) -> list[int | Exception]:
        return [filled(job, rows) for job in jobs]

    def close(self) -> None:
        self._compiled.clear()


def filled(job: MaskJob, rows: NDArray[np.int32]) -> int | Exception:
    """One job by its grammar's own ``fill``."""
    try:
        return job.grammar.fill(rows[job.first : job.first + 1 + len(job.drafts)], job.drafts)
    except Exception as why:
        return why


def packed(mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """A mask as the words of a bitmask row."""
    words = -(-len(mask) // 32)
    bits = np.zeros(words * 32, np.uint8)
    bits[: len(mask)] = mask
    return np.packbits(bits, bitorder="little").view(np.int32)


class MemoryStore:
    """A KV tier in memory that moves pages *outside* the device's stream, on threads of its own.

    ``spoiled`` counts pages that changed while they were being copied out: somebody gave them to
    another request too early. Some loads fail half way, and some answers take a second question.
    """

    name = "memory"

    def __init__(self, kv: NDArray[np.uint64], seed: int, delay: float = 0.0005) -> None:
        self.kv = kv
        self.blobs: dict[bytes, NDArray[np.uint64]] = {}
        self.spoiled = 0
        self.loaded = 0
        self._rng = random.Random(seed)
        self._asked: set[bytes] = set()
        self._delay = delay

    def lookup(self, keys: Sequence[PageKey], ticket: Any | None) -> Lookup:
        last = keys[-1].digest
        if last not in self._asked and self._rng.random() < 0.2:
            self._asked.add(last)
            return Lookup(0, retry=True)
        return Lookup(
            next((i for i, k in enumerate(keys) if k.digest not in self.blobs), len(keys))
        )

    def load(self, keys: Sequence[PageKey], pages: Sequence[int]) -> ToyTransfer:
        blobs, breaks = [self.blobs[key.digest] for key in keys], self._rng.random() < 0.2

        def work() -> str | None:
            for blob, page in zip(blobs, pages, strict=True):
                self.kv[page] = blob * np.uint64(3) if breaks else blob
            self.loaded += not breaks
            return "planted failure" if breaks else None

        return ToyTransfer(work, self._delay)

    def store(
        self, keys: Sequence[PageKey], pages: Sequence[int], keep_seconds: float | None
    ) -> ToyTransfer:
        pages, before = list(pages), self.kv[list(pages)].copy()

        def work() -> None:
            after = self.kv[pages].copy()
            self.spoiled += int((after != before).any(axis=1).sum())
            self.blobs.update(zip([key.digest for key in keys], after, strict=True))

        return ToyTransfer(work, self._delay)

    def forget(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self.blobs.pop(key.digest, None)


class ToyTransfer:
    """Work on a thread, after a delay; a :class:`~deepinfer.api.kv.Transfer`."""

    def __init__(self, work: Callable[[], str | None], delay: float) -> None:
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, args=(work, delay), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], str | None], delay: float) -> None:
        time.sleep(delay)
        self._failure = work()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def failed(self) -> str | None:
        return self._failure
