"""From emitted tokens to what the caller sees: :class:`OutputProcessor`.

``engine.py`` hands over each row's tokens as they arrive; one walk over them finds where the
request ends, makes text, holds back what may become a stop string, and builds the
:class:`~deepinfer.api.plan.Delta`. Nothing behind a stop is ever visible, and text is never taken
back. Cost per token does not grow with the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from deepinfer.api.plan import Delta, Fault, RequestMetrics, TokenLogprob
from deepinfer.engine.detokenizer import IncrementalDetokenizer, LateDetokenizer
from deepinfer.engine.reasoning import AfterReasoning
from deepinfer.engine.request import RequestState, Status
from deepinfer.engine.stops import Held, StopStrings
from deepinfer.errors import InvalidRequestError, ModelFaultError

if TYPE_CHECKING:
    from deepinfer.api.grammar import Grammar
    from deepinfer.api.plan import LogprobRows, Request, StepOutput
    from deepinfer.engine.detokenizer import TokenText

Finish = Literal["stop", "length", "schema_violation", "abort", "error"]
TokenLogprobs = dict[int, TokenLogprob]


class Walked(NamedTuple):
    """What became of a row's ids: how many count, their text, and why the request ended."""

    kept: int
    text: str
    finish: Finish | None = None
    reason: int | str | None = None


class OutputState:
    """One request's way out: its ends, its text, its logprobs, its times.

    ``plain``: of a token that does not end it only text is wanted. False until the first token.
    """

    __slots__ = (
        "detokenizer",
        "ends",
        "metrics",
        "min_len",
        "plain",
        "prompt",
        "stops",
        "wants_logprobs",
        "wants_prompt",
    )

    def __init__(self, request: Request, tokenizer: TokenText | None) -> None:
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids)
        self.ends = ends if sampling.ignore_eos else ends | request.eos_ids
        self.min_len = len(request.token_ids) + sampling.min_tokens
        self.plain = False
        self.detokenizer: IncrementalDetokenizer | None = None
        self.stops: StopStrings | None = None
        if tokenizer is not None and sampling.detokenize:
            late = not (request.stream or sampling.stop) and tokenizer.text_kind != "other"
            self.detokenizer = (LateDetokenizer if late else IncrementalDetokenizer)(
                tokenizer,
                request.token_ids,
                sampling.skip_special_tokens,
                sampling.spaces_between_special_tokens,
            )
            if sampling.stop:
                self.stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self.metrics = RequestMetrics(request.arrival, prompt_tokens=len(request.token_ids))
        self.wants_logprobs = sampling.logprobs is not None
        self.wants_prompt = sampling.prompt_logprobs is not None
        self.prompt: list[TokenLogprobs | None] = []

    def flush(self) -> str:
        """All text that was held back."""
        held = self.stops.flush() if self.stops is not None else ""
        return held + (self.detokenizer.finish() if self.detokenizer is not None else "")


class Logprobs:
    """A step's logprobs, found by row and token."""

    def __init__(self, rows: LogprobRows, width: int) -> None:
        self.width = width
        self.ids: list[list[int]] = rows.token_ids.tolist()
        self.values: list[list[float]] = rows.values.tolist()
        self.ranks: list[int] = rows.ranks.tolist()
        self.at: dict[int, int] = {key: m for m, key in enumerate(rows.index.tolist())}


class OutputProcessor:
    """Makes deltas. Texts of single tokens, for logprobs, are kept: at most one for each id."""

    def __init__(self, tokenizer: TokenText | None) -> None:
        self.tokenizer = tokenizer
        self._decoded: dict[int, str] = {}

    def state(self, request: Request) -> OutputState:
        """The output side of a new request."""
        if request.sampling.stop and self.tokenizer is None:
            raise InvalidRequestError(
                f"Request {request.id}: stop texts need a tokenizer, and this engine has none.",
                setting="stop",
                next_step="Use stop_token_ids.",
            )
        return OutputState(request, self.tokenizer)

    def take(
        self, planned: Sequence[RequestState], out: StepOutput, now: float
    ) -> tuple[list[Delta], list[tuple[RequestState, Delta]]]:
        """All deltas of a step, and the requests that end with them; dead rows are skipped."""
        deltas: list[Delta] = []
        over: list[tuple[RequestState, Delta]] = []
        tokens: list[list[int]] = out.tokens.tolist()
        found = None if out.logprobs is None else Logprobs(out.logprobs, out.tokens.shape[1])
        for row, chunk in out.prompt_logprobs:
            if planned[row].output.wants_prompt:
                self._prompt_chunk(planned[row], chunk)
        for i, (r, n) in enumerate(zip(planned, out.counts.tolist(), strict=True)):
            if not n or r.status is Status.FINISHED:
                continue
            delta = self._plain(r, tokens[i][0], now) if n == 1 and r.output.plain else None
            if delta is None:
                delta = self._row(r, tokens[i][:n], found, i, now)
            deltas.append(delta)
            if delta.finish is not None:
                over.append((r, delta))
        return deltas, over

    def _plain(self, r: RequestState, token: int, now: float) -> Delta | None:
        """The common row, and the hottest code here: one token of which only text is wanted.

        None, and nothing done, if the token may end the request: ``_row`` decides that.
        """
        output, tokens = r.output, r.tokens
        if token in output.ends or len(tokens) + 1 >= r.request.limit:
            return None
        tokens.append(token)
        ids = (token,)
        reader, stops = output.detokenizer, output.stops
        text = "" if reader is None else reader.push(ids)
        if stops is None:
            return Delta(r.request.id, ids, text)
        text, stop = stops.push(text, len(tokens) > output.min_len)
        if stop is None:
            return Delta(r.request.id, ids, text)
        output.metrics.finished, output.metrics.output_tokens = now, r.output_tokens
        return Delta(
            r.request.id, ids, text, finish="stop", stop_reason=stop, metrics=output.metrics
        )

    def _row(
        self, r: RequestState, ids: list[int], found: Logprobs | None, i: int, now: float
    ) -> Delta:
        """What one row's tokens become."""
        output, metrics = r.output, r.output.metrics
        closed, error = False, None
        if r.grammar is not None:
            ids, closed, error = self._accept(r, r.grammar, ids)
        kept, text, finish, reason = self.extend(r, ids, closed)
        if kept < len(ids):
            ids = ids[:kept]
        if metrics.first_token is None:
            metrics.first_token = now
            output.plain = r.grammar is None and not output.wants_logprobs
        if error is not None:
            finish, reason = "error", None
        if finish is not None:
            metrics.finished = now
            metrics.output_tokens = r.output_tokens
        return Delta(
            request_id=r.request.id,
            token_ids=tuple(ids),
            text=text,
            logprobs=self._of_row(found, i, kept) if found and output.wants_logprobs else None,
            prompt_logprobs=self._take_prompt(r) if output.wants_prompt else None,
            finish=finish,
            stop_reason=reason,
            error=error,
            metrics=metrics if finish is not None else None,
        )

    def _accept(
        self, r: RequestState, grammar: Grammar, ids: list[int]
    ) -> tuple[list[int], bool, Exception | None]:
        """Move a matcher: the ids up to the text's end, whether that is reached, what went wrong.

        A refusal is a bug, ours or the plugin's, and fails its request.
        """
        try:
            ids = ids[: grammar.accept(ids)]
            closed = grammar.done()
        except Exception as why:
            return ids, False, why
        if isinstance(grammar, AfterReasoning) and grammar.over:
            r.grammar = grammar.inner
        return ids, closed, None

    def extend(self, r: RequestState, ids: list[int], closed: bool = False) -> Walked:
        """Append ids to ``r.tokens`` up to the end of the request; a stop wins over the limit.

        ``closed``: behind the last of them nothing but the end may follow, so they end the text.
        """
        output, tokens, limit = r.output, r.tokens, r.request.limit
        detokenizer, stops, ends = output.detokenizer, output.stops, output.ends
        if stops is not None:
            return self._extend_with_stops(r, ids, closed)
        finish: Finish | None = None
        kept = 0
        for token in ids:
            tokens.append(token)
            kept += 1
            if token in ends and len(tokens) > output.min_len:
                finish = "stop"
                break
            if len(tokens) >= limit:
                finish = "length"
                break
        reason = _stop_id(r, ids[kept - 1]) if finish == "stop" else None
        drawn = finish == "stop"  # an end that is a token of its own
        if closed and kept == len(ids):
            finish = "stop"
        if detokenizer is None:
            return Walked(kept, "", finish, reason)
        shown = ids[:kept]
        if drawn and not r.request.sampling.include_stop_str_in_output:
            shown = shown[:-1]
        text = detokenizer.push(shown)
        return Walked(kept, text if finish is None else text + output.flush(), finish, reason)

    def _extend_with_stops(self, r: RequestState, ids: list[int], closed: bool) -> Walked:
        """The same where stop strings are looked for, token by token."""
        output, tokens = r.output, r.tokens
        stops, detokenizer = output.stops, output.detokenizer
        assert stops is not None and detokenizer is not None
        text = ""
        for kept, token in enumerate(ids, start=1):
            tokens.append(token)
            armed = len(tokens) > output.min_len
            ended = armed and token in output.ends
            if not ended or r.request.sampling.include_stop_str_in_output:
                held = stops.push(detokenizer.push((token,)), armed)
                text += held.text
                if held.stop is not None:
                    return Walked(kept, text, "stop", held.stop)
            closes = closed and kept == len(ids)
            if ended or closes or len(tokens) >= r.request.limit:
                last = self._end_with_stops(output, armed)
                text += last.text
                if ended:
                    return Walked(kept, text, "stop", _stop_id(r, token))
                return Walked(kept, text, "stop" if last.stop or closes else "length", last.stop)
        return Walked(len(ids), text)

    def _end_with_stops(self, output: OutputState, armed: bool) -> Held:
        """Release what the detokenizer held; even that may complete a stop string."""
        assert output.stops is not None and output.detokenizer is not None
        held = output.stops.push(output.detokenizer.finish(), armed)
        return held if held.stop is not None else Held(held.text + output.stops.flush())

    # Logprobs.

    def _of_row(self, found: Logprobs, row: int, kept: int) -> tuple[TokenLogprobs, ...]:
        """One dictionary for each of the row's tokens that count."""
        first = row * found.width
        return tuple([self._candidates(found, found.at[first + j]) for j in range(kept)])

    def _prompt_chunk(self, r: RequestState, rows: LogprobRows) -> None:
        """Collect what a prefill chunk says of the prompt; the first token has no logprob."""
        output = r.output
        if not output.prompt:
            output.prompt = [None] * len(r.request.token_ids)
        found = Logprobs(rows, 1)
        for position, m in found.at.items():
            if 0 < position < len(output.prompt):
                output.prompt[position] = self._candidates(found, m)

    def _take_prompt(self, r: RequestState) -> tuple[TokenLogprobs | None, ...]:
        """The prompt's logprobs, once, with the first output."""
        prompt = r.output.prompt or [None] * len(r.request.token_ids)
        r.output.wants_prompt, r.output.prompt = False, []
        return tuple(prompt)

    def _candidates(self, found: Logprobs, m: int) -> TokenLogprobs:
        """The token itself with its rank, then the best ones, best first."""
        ids, values = found.ids[m], found.values[m]
        own = TokenLogprob(values[0], found.ranks[m], self._text(ids[0]))
        result = {ids[0]: own}
        for rank in range(1, len(ids)):
            if ids[rank] >= 0 and ids[rank] != ids[0]:
                result[ids[rank]] = TokenLogprob(values[rank], rank, self._text(ids[rank]))
        return result

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self._decoded.get(token)
        if text is None:
            text = self._decoded[token] = self.tokenizer.decode((token,), False)
        return text


def _stop_id(r: RequestState, token: int) -> int | None:
    """The reason that callers see: a stop id of theirs; the model's own end has none."""
    return token if token in r.request.sampling.stop_token_ids else None


def ended(r: RequestState, finish: Finish, now: float, error: Exception | None = None) -> Delta:
    """The last delta of a request that did not end by its own tokens.

    Text that was held back stays so: it might have become a stop string.
    """
    output, metrics = r.output, r.output.metrics
    metrics.finished, metrics.output_tokens = now, r.output_tokens
    text = "" if output.detokenizer is None else output.detokenizer.overdue()
    return Delta(r.request.id, text=text, finish=finish, error=error, metrics=metrics)


def row_fault(r: RequestState, fault: int) -> ModelFaultError:
    """What a row's fault means to the caller."""
    where = f"Request {r.request.id}: at position {len(r.tokens)}"
    if fault == Fault.NOTHING_ALLOWED:
        return ModelFaultError(
            f"{where} no token may be sampled.",
            next_step="Check allowed_token_ids, logit_bias, bad_words, min_tokens and the grammar: "
            "together they exclude the whole vocabulary.",
        )
    return ModelFaultError(
        f"{where} the model's logits are NaN.",
        next_step="Check the checkpoint (was it cut short or converted wrongly?) and the dtype: "
        "float32 tells a broken file from an overflow.",
    )
