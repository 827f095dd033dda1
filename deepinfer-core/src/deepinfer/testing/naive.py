"""One request, one token at a time, everything looked at from the beginning: :func:`naive`.

The oracle of ``scenarios.py``. It knows no pages, steps, bounds or drafts, decodes text with the
standard library, and searches all of it for stop strings after every character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.api.plan import Request
from deepinfer.testing.fake import FakeScript
from deepinfer.testing.toy import (
    ToyGrammar,
    ToyTokenizer,
    candidates,
    draw,
    process,
    toy_logits,
)

TOKENIZER = ToyTokenizer()


class Oracle(Protocol):
    """A matcher that looks at one token at a time."""

    def mask(self) -> NDArray[np.bool_]:
        """Which ids may come next."""
        ...

    def advance(self, token: int) -> bool:
        """Move if the token is legal."""
        ...

    def done(self) -> bool:
        """Nothing but the end may follow."""
        ...


class Answer(NamedTuple):
    """What a request comes to."""

    ids: tuple[int, ...]
    text: str
    finish: str
    reason: int | str | None
    logprobs: tuple[Any, ...]
    prompt_logprobs: tuple[Any, ...] | None


def toy_grammar(request: Request, vocab: int) -> Oracle:
    """The matcher of a structured request."""
    return ToyGrammar(request.structured, vocab, ends_of(request))


def ends_of(request: Request) -> frozenset[int]:
    """The ids that end its text."""
    own = frozenset(request.sampling.stop_token_ids)
    return own if request.sampling.ignore_eos else own | request.eos_ids


def naive(
    request: Request,
    script: FakeScript,
    grammar_of: Callable[[Request, int], Oracle] = toy_grammar,
) -> Answer:
    """One token at a time, everything looked at from the beginning."""
    tokens, prompt_logprobs, model = list(request.token_ids), None, script.text(request)
    params, asked = request.row_params, request.sampling
    prompt_len = len(tokens)
    if asked.prompt_logprobs is not None:
        prompt_logprobs = (None, *_prompt_logprobs(request, script))
    for token in tokens[:-1]:
        model.push(token)
    grammar = None
    if request.structured is not None:
        grammar = grammar_of(request, script.vocab_size)
    reader, logprobs = _Reader(request), list[Any]()
    while True:
        if tokens[-1] == script.poison:
            return _failed(tokens[prompt_len:], reader.text, logprobs, prompt_logprobs)
        raw = toy_logits(model.push(tokens[-1]), script.vocab_size)
        z = process(raw, tokens, params, None if grammar is None else grammar.mask())
        token = draw(z, request.seed, len(tokens), params.temperature)
        if token < 0:
            return _failed(tokens[prompt_len:], reader.text, logprobs, prompt_logprobs)
        tokens.append(token)
        if asked.logprobs is not None:
            logprobs.append(_table(*candidates(raw, token, params.logprobs)))
        if grammar is not None:
            assert grammar.advance(token)
        finish = reader.push(token, len(tokens), grammar is not None and grammar.done())
        if finish is not None:
            ids, text = tuple(tokens[prompt_len:]), reader.text
            return Answer(ids, text, *finish, tuple(logprobs), prompt_logprobs)


def _failed(ids: list[int], text: str, logprobs: list[Any], prompt: Any) -> Answer:
    return Answer(tuple(ids), text, "error", None, tuple(logprobs), prompt if ids else None)


def _table(ids: list[int], values: list[float], rank: int) -> dict[int, tuple[float, int]]:
    table = {t: (float(np.float32(v)), k) for k, (t, v) in enumerate(zip(ids, values, strict=True))}
    return {**table, ids[0]: (float(np.float32(values[0])), rank)}


def _prompt_logprobs(request: Request, script: FakeScript) -> list[dict[int, tuple[float, int]]]:
    model, found = script.text(request), []
    for p, token in enumerate(request.token_ids[:-1]):
        z = toy_logits(model.push(token), script.vocab_size)
        best = candidates(z, request.token_ids[p + 1], request.row_params.prompt_logprobs)
        found.append(_table(*best))
    return found


class _Reader:
    """Text and stops of the naive loop: the whole text is searched after every character."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.asked = request.sampling
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""

    def push(
        self, token: int, length: int, closed: bool = False
    ) -> tuple[str, int | str | None] | None:
        """Why it ends with this token, if it does. ``closed``: its grammar has ended."""
        asked, prompt_len = self.asked, len(self.request.token_ids)
        armed = length - prompt_len > asked.min_tokens
        eos = () if asked.ignore_eos else self.request.eos_ids
        ends = armed and (token in eos or token in asked.stop_token_ids)
        shown = not ends or asked.include_stop_str_in_output
        if shown and not (asked.skip_special_tokens and token in TOKENIZER.special_ids):
            stop = self._read(self.decoder.decode(TOKENIZER.token_bytes(token)), armed)
            if stop is not None:
                return "stop", stop
        if ends or closed or length >= self.request.limit:
            stop = self._read(self.decoder.decode(b"", final=True), armed)
            if ends:
                return "stop", token if token in asked.stop_token_ids else None
            return ("stop", stop) if stop or closed else ("length", None)
        return None

    def _read(self, piece: str, armed: bool) -> str | None:
        for char in piece:
            self.text += char
            for stop in sorted(self.asked.stop, key=len, reverse=True) if armed else ():
                if self.text.endswith(stop):
                    if not self.asked.include_stop_str_in_output:
                        self.text = self.text[: -len(stop)]
                    return str(stop)
        return None
