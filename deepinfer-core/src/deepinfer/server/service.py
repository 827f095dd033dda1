"""Between a route and the engine: what is open, who may come in, and how a request is run.

Where you are: one :class:`Service` a server. Everything that takes long with one request (reading
its body, templates, tokens, images) runs on its threads; the event loop only carries news.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from deepinfer.chat.interface import NO_WISHES, ChatOptions, Message
from deepinfer.errors import InvalidRequestError
from deepinfer.sampling_params import SamplingParams
from deepinfer.server.config import ServerConfig
from deepinfer.server.errors import Refusal
from deepinfer.server.health import Phase, Readiness, Stall
from deepinfer.server.limits import Limits, queue_full
from deepinfer.server.metrics import Metrics
from deepinfer.server.tracing import NO_TRACER, Tracer

if TYPE_CHECKING:
    from deepinfer.entrypoints.async_llm import AsyncLLM
    from deepinfer.entrypoints.inputs import Prepared, Prompt
    from deepinfer.entrypoints.outputs import RequestOutput
    from deepinfer.server.exchange import Writer

_T = TypeVar("_T")
_THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request in our words, whatever dialect it came in.

    Args:
        params: for every prompt of it.
        writer: makes its answer in the dialect's words, once it was let in.
        prompts: texts or ids; or ``messages`` with ``options``, a conversation.
        stream: whether the answer is wanted in pieces.
        ignored: paths of fields that were accepted and change nothing, for the warning header.
    """

    params: SamplingParams
    writer: Callable[[Run], Writer]
    prompts: Sequence[Prompt] = ()
    messages: Sequence[Message] | None = None
    options: ChatOptions = NO_WISHES
    stream: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request, all prompts together."""

    prompt: int = 0
    output: int = 0
    cached: int = 0


@dataclass(slots=True)
class Run:
    """A request that may be handed to the engine, and what is known of it so far."""

    id: str
    asked: Asked
    prepared: Sequence[Prepared]
    usage: Usage = field(default_factory=Usage)
    finishes: list[str] = field(default_factory=list)

    def saw(self, output: RequestOutput) -> None:
        """Keep count; no output says again what an earlier one said (kinds delta, final_only)."""
        self.usage.output += sum(len(out.token_ids) for out in output.outputs)
        if output.finished and output.metrics is not None:
            self.usage.cached += output.metrics.cached_tokens
        self.finishes += [out.finish_reason for out in output.outputs if out.finish_reason]


class Service:
    """A server's engine and state.

    Args:
        config: limits and manners.
        metrics: counts; an observer of the engine.
        tracer: makes spans of requests.
    """

    def __init__(
        self, config: ServerConfig, metrics: Metrics | None = None, tracer: Tracer = NO_TRACER
    ) -> None:
        self.config = config
        self.metrics = metrics or Metrics()
        self.limits = Limits(config)
        self.tracer = tracer
        self.phase: Phase = "loading"
        self.running: dict[str, Run] = {}
        self._llm: AsyncLLM | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="deepinfer-server")
        self.stall = Stall(self.metrics, self._unfinished, config.stall_seconds)

    @property
    def llm(self) -> AsyncLLM:
        """The engine.

        Raises:
            Refusal: 503; it is still loading.
        """
        if self._llm is None:
            raise Refusal(503, "loading", "The model is still loading.", retry_after=5)
        return self._llm

    @property
    def names(self) -> tuple[str, ...]:
        """What the model is called; the first is what answers call it. No place on this machine."""
        llm = self.llm
        if self.config.served_names:
            return self.config.served_names
        own = "" if llm.assembly.tokenizer is None else llm.get_tokenizer().name
        given = llm.assembly.config.model
        public = "" if Path(given).exists() else given
        return tuple(dict.fromkeys(n for n in (own, public) if n)) or ("model",)

    @property
    def capacity(self) -> int:
        """Samples that may be inside at once, running or waiting."""
        return int(self.llm.assembly.config.max_num_seqs) + self.config.max_queue

    def attach(self, llm: AsyncLLM) -> None:
        """The model is loaded: serve it."""
        self._llm = llm
        gauges: Mapping[str, Callable[[], float]] = {
            "http_requests_inside": lambda: self.limits.inside,
            "ready": lambda: self.readiness().ready,
            "tasks": _tasks,
        }
        self.metrics.watch(llm.assembly, gauges)
        self.phase = "serving"

    def drain(self) -> None:
        """From now on new requests are refused; those inside go on."""
        self.phase = "draining"

    def close(self) -> None:
        """Give the threads back. The engine belongs to who opened it."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_open(self) -> None:
        """Raise 503 unless new requests are served."""
        if self.phase == "draining":
            raise Refusal(503, "draining", "This server is shutting down.", retry_after=5)
        error = self.llm.dead_error
        if error is not None:
            raise error

    def readiness(self) -> Readiness:
        """Loaded, alive, not stuck, not draining."""
        if self.phase != "serving":
            return Readiness(False, self.phase)
        dead = self.death()
        if dead is not None:
            return Readiness(False, "dead", dead)
        stuck = self.stall.look()
        if stuck is not None:
            return Readiness(False, "stalled", f"Requests run and no step ended for {stuck:.0f} s.")
        return Readiness(True, "ready")

    def death(self) -> str | None:
        """Why the engine is gone, if it is."""
        error = None if self._llm is None else self._llm.dead_error
        return None if error is None else str(error)

    def _unfinished(self) -> int:
        return 0 if self._llm is None else self._llm.get_num_unfinished_requests()

    async def in_thread(self, job: Callable[[], _T]) -> _T:
        """Run what takes long with one request."""

        def guarded() -> _T:
            try:
                return job()
            except StopIteration as why:  # no future can hold one: the caller would wait for ever
                raise RuntimeError("a job ended with StopIteration") from why

        return await asyncio.get_running_loop().run_in_executor(self._threads, guarded)

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not served here."""
        path = () if self.config.served_names else (self.llm.assembly.config.model,)
        if name is not None and name not in (*self.names, *path):
            known = " or ".join(map(repr, self.names))
            raise Refusal(
                404,
                "model_not_found",
                f"The model {name[:200]!r} is not served here; {known} is.",
                param="model",
            )

    def open(self, run_id: str, asked: Asked) -> Run:
        """Make requests of it. On a thread.

        Raises:
            DeepInferError: what cannot be honoured.
        """
        asked = self._bounded(asked)
        assembly = self.llm.assembly
        prompts: Sequence[Prompt] = asked.prompts
        if asked.messages is not None:
            prompts = [assembly.render_chat(asked.messages, asked.options)]
        prepare = assembly.preparer.prepare
        prepared = [
            prepare(f"{run_id}.{i}" if i else run_id, prompt, asked.params)
            for i, prompt in enumerate(prompts)
        ]
        run = Run(run_id, asked, prepared)
        run.usage.prompt = sum(len(p.token_ids) for p in prepared)
        return run

    def _bounded(self, asked: Asked) -> Asked:
        """Within this server's bounds; an output without one gets ours."""
        count = asked.params.n * max(1, len(asked.prompts))
        most = min(self.config.max_n, self.capacity)
        if count > most:
            raise InvalidRequestError(
                f"{count} samples are asked, and one request may ask {most}.", setting="n"
            )
        return replace(asked, params=self.bounded(asked.params))

    def bounded(self, params: SamplingParams) -> SamplingParams:
        """Parameters within this server's bound of an output; one without a length gets ours."""
        longest, wished = self.config.max_tokens, params.max_tokens
        if longest is None or (wished is not None and wished <= longest):
            return params
        if wished is not None:
            raise InvalidRequestError(
                f"max_tokens={wished}, and this server's bound is {longest}.", setting="max_tokens"
            )
        return params.model_copy(update={"max_tokens": longest})

    async def outputs(self, run: Run) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """What the engine says, as (number of the prompt, output). Leaving it frees everything.

        Raises:
            Refusal: 429; there is no place for it.
            DeepInferError: a prompt failed; the others of this request end with it.
        """
        llm = self.llm
        samples = sum(len(p.requests) for p in run.prepared)
        if llm.get_num_unfinished_requests() + samples > self.capacity:
            raise queue_full()
        self.stall.begins()
        self.running[run.id] = run
        streams = [llm.stream(prepared) for prepared in run.prepared]
        spans = [self.tracer.begin(run.id, prepared) for prepared in run.prepared]
        try:
            source = _numbered(streams[0]) if len(streams) == 1 else _merged(streams)
            async with aclosing(source):
                async for number, output in source:
                    run.saw(output)
                    if output.finished:
                        spans[number].end(output)
                    yield number, output
        finally:
            self.running.pop(run.id, None)
            for span in spans:
                span.leave()

    async def abort(self, ids: Iterable[str] | None) -> list[str]:
        """End requests by the ids that their answers carry, or all; gives those that ran."""
        wanted = tuple(self.running) if ids is None else tuple(ids)
        found = [name for name in wanted if name in self.running]
        for name in found:
            for prepared in self.running[name].prepared:
                await self.llm.abort(prepared.request_id)
        return found


def _tasks() -> float:
    """Tasks of the event loop that asks; NaN where none does."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return float("nan")


async def _numbered(
    stream: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    async with aclosing(stream):
        async for output in stream:
            yield 0, output


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Several prompts of one request, as news comes; the first failure ends all."""
    # One place: a stream that finds it taken waits, and its steps are folded meanwhile.
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(1)

    async def pump(number: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((number, output))
            await queue.put((number, None))
        except Exception as why:
            await queue.put((number, why))

    pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            number, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                left -= 1
            else:
                yield number, news
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def last_of(
    outputs: AsyncIterator[tuple[int, RequestOutput]],
) -> list[RequestOutput]:
    """The last output of each prompt, in order."""
    found: dict[int, RequestOutput] = {}
    async for number, output in outputs:
        found[number] = output
    return [found[number] for number in sorted(found)]
