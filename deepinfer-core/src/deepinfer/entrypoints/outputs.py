"""What a caller gets back: :class:`RequestOutput`, built from the engine's deltas.

Where you are: the engine speaks of single samples ("request x, sample 2, gained these tokens");
callers think in prompts. :class:`Gathering` collects the deltas of one prompt's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer.api.plan import Delta, RequestMetrics, TokenLogprob
from deepinfer.chat.interface import ChatMessage, ChatPiece, MessageBuilder, OutputParser

Logprobs = dict[int, TokenLogprob]
OutputKind = Literal["cumulative", "delta", "final_only"]
_SHOWN = 48


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One generated token; ``logprob`` and ``text`` are there if logprobs were asked for."""

    token_id: int
    logprob: float | None = None
    text: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of one prompt.

    ``finish_reason`` is None while it runs, then ``stop``, ``length``, ``abort`` or ``error``, or
    ``tool_calls`` where an answer was taken apart and ended with calls; ``stop_reason`` is the stop
    text or stop id that ended it (None for the model's own end). ``message`` holds the parts of a
    conversation's answer, where the chat format reads them; ``text`` is raw, marks included.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    message: ChatMessage | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def tokens(self) -> list[OutputToken]:
        """The tokens as objects."""
        if self.logprobs is None:
            return [OutputToken(token) for token in self.token_ids]
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return [OutputToken(t, lp[t].logprob, lp[t].decoded_token) for t, lp in pairs]

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={_short(self.text)}, "
            f"tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r})"
        )


@dataclass(slots=True)
class RequestOutput:
    """What one prompt brought.

    Iterating gives the tokens of the first sample: ``[t.token_id for t in output]``. ``error``
    holds the exception of a request that failed; ``prompt`` is None when ids were given.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None = None
    metrics: RequestMetrics | None = None
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.outputs[0].text

    def __iter__(self) -> Iterator[OutputToken]:
        return iter(self.outputs[0].tokens)

    def __repr__(self) -> str:
        about = f", error={self.error!r}" if self.error is not None else ""
        prompt = "None" if self.prompt is None else _short(self.prompt)
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={prompt}, "
            f"prompt_tokens={len(self.prompt_token_ids)}, outputs={self.outputs!r}, "
            f"finished={self.finished}{about})"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def failed_output(
    request_id: str, prompt: str | None, token_ids: Sequence[int], error: Exception
) -> RequestOutput:
    """The output of a request that never ran."""
    ended = CompletionOutput(0, finish_reason="error")
    return RequestOutput(request_id, prompt, list(token_ids), [ended], True, error=error)


class Gathering:
    """The samples of one prompt while they run: ``add`` deltas, ``output`` what there is.

    Args:
        request_id: the caller's name for the prompt.
        prompt, token_ids: the prompt as given and as ids.
        samples: how many run; sample i's deltas come as ``add(i, delta)``.
        kind: what ``output`` gives: everything so far, or what came since it was last asked.
        parser: makes a parser of the answer, one for each sample.
        logprobs: they were asked for, so each sample has a list of them: as many as tokens, none
            where it ended before its first.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: Sequence[int],
        samples: int,
        kind: OutputKind = "cumulative",
        parser: Callable[[], OutputParser] | None = None,
        logprobs: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.token_ids = list(token_ids)
        self.kind = kind
        self.error: Exception | None = None
        self._parts = [_Sample(i, parser and parser(), logprobs) for i in range(samples)]
        self._prompt_logprobs: list[Logprobs | None] | None = None
        self._metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(part.out.finished() for part in self._parts)

    def add(self, index: int, delta: Delta) -> None:
        """Take one sample's news."""
        self._parts[index].add(delta)
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = list(delta.prompt_logprobs)
        if delta.error is not None and self.error is None:
            self.error = delta.error
        if delta.metrics is not None:
            self._metrics = _joined(self._metrics, delta.metrics)

    def fail(self, error: Exception) -> None:
        """End all that still runs: the engine is gone."""
        self.error = self.error or error
        for part in self._parts:
            if not part.out.finished():
                part.add(Delta("", finish="error"))

    def output(self) -> RequestOutput:
        """A snapshot; it does not change when more arrives."""
        if self.kind == "delta":
            outputs = [out for part in self._parts if (out := part.news()) is not None]
        else:
            outputs = [part.snapshot() for part in self._parts]
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.token_ids,
            outputs,
            self.finished,
            self._prompt_logprobs,
            self._metrics,
            self.error,
        )


class _Sample:
    """One sample's text so far, and how much of it has been handed out."""

    def __init__(
        self, index: int, parser: OutputParser | None = None, logprobs: bool = False
    ) -> None:
        self.out = CompletionOutput(index)
        if logprobs:
            self.out.logprobs, self.out.cumulative_logprob = [], 0.0
        self._answer = None if parser is None else _Answer(parser)
        self._told_tokens = 0
        self._told_text = 0
        self._told_end = False
        self._pieces: list[str] = []

    def add(self, delta: Delta) -> None:
        out = self.out
        out.token_ids.extend(delta.token_ids)
        if delta.text:
            self._pieces.append(delta.text)
        if delta.logprobs is not None:
            out.logprobs = out.logprobs or []
            out.logprobs.extend(delta.logprobs)
            sums = (lp[t].logprob for t, lp in zip(delta.token_ids, delta.logprobs, strict=True))
            out.cumulative_logprob = (out.cumulative_logprob or 0.0) + sum(sums)
        if delta.finish is not None:
            out.finish_reason, out.stop_reason = delta.finish, delta.stop_reason

    def snapshot(self) -> CompletionOutput:
        out = self.out
        if self._pieces:  # joined when looked at: adding to a text once a step is quadratic
            new = "".join(self._pieces)
            self._pieces.clear()
            out.text += new
            if self._answer is not None:
                self._answer.feed(new)
        logprobs = None if out.logprobs is None else list(out.logprobs)
        whole = CompletionOutput(
            out.index,
            out.text,
            list(out.token_ids),
            out.cumulative_logprob,
            logprobs,
            out.finish_reason,
            out.stop_reason,
        )
        if self._answer is not None:
            if out.finish_reason is not None:
                whole.finish_reason = self._answer.finish(out.finish_reason)
            whole.message = self._answer.message()
        return whole

    def news(self) -> CompletionOutput | None:
        whole = self.snapshot()
        tokens, text = self._told_tokens, self._told_text
        ended = whole.finished() and not self._told_end
        if len(whole.token_ids) == tokens and len(whole.text) == text and not ended:
            return None
        self._told_tokens, self._told_text = len(whole.token_ids), len(whole.text)
        self._told_end = whole.finished()
        whole.token_ids, whole.text = whole.token_ids[tokens:], whole.text[text:]
        if whole.logprobs is not None:
            whole.logprobs = whole.logprobs[tokens:]
        if self._answer is not None:
            whole.message = self._answer.news()
        return whole


class _Answer:
    """One answer while it is taken apart: all of it, and what has not been handed out."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._whole = MessageBuilder()
        self._new = MessageBuilder()
        self._ended = False

    def feed(self, text: str) -> None:
        self._take(self._parser.feed(text))

    def finish(self, reason: str) -> str:
        """End it, once; the reason to show in place of the engine's."""
        if not self._ended:
            self._ended = True
            self._take(self._parser.finish(reason))
        return self._parser.finish_reason or reason

    def _take(self, pieces: Sequence[ChatPiece]) -> None:
        self._whole.add(pieces)
        self._new.add(pieces)

    def message(self) -> ChatMessage:
        return self._whole.message()

    def news(self) -> ChatMessage:
        """What came since this was last asked."""
        new, self._new = self._new, MessageBuilder()
        return new.message()


def _joined(one: RequestMetrics | None, two: RequestMetrics) -> RequestMetrics:
    """Of parallel samples: the first to start, the last to end, all tokens counted."""
    if one is None:
        return two
    sums: dict[str, Any] = {
        name: getattr(one, name) + getattr(two, name)
        for name in ("output_tokens", "preemptions", "drafted", "verified", "accepted")
    }
    return RequestMetrics(
        arrival=min(one.arrival, two.arrival),
        first_scheduled=_least(one.first_scheduled, two.first_scheduled),
        first_token=_least(one.first_token, two.first_token),
        finished=max(filter(None, (one.finished, two.finished)), default=None),
        cached_tokens=min(one.cached_tokens, two.cached_tokens),
        prompt_tokens=one.prompt_tokens,
        **sums,
    )


def _least(one: float | None, two: float | None) -> float | None:
    return min((t for t in (one, two) if t is not None), default=None)
