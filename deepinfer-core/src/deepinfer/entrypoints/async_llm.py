"""``AsyncLLM``: the same engine for asyncio.

Where you are: the other front door. The engine's thread (``driver``) wakes the event loop once a
step with everything that its streams gained; each stream folds its part. A stream that is left,
cancelled, closed or collected ends its requests.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from deepinfer.api.plan import Delta
from deepinfer.chat import ChatOptions
from deepinfer.chat.interface import ToolChoice
from deepinfer.entrypoints.assemble import Assembly
from deepinfer.entrypoints.front import FrontDoor
from deepinfer.entrypoints.inputs import Message, Prepared, Prompt
from deepinfer.entrypoints.outputs import Gathering, RequestOutput
from deepinfer.errors import DeepInferError, InvalidRequestError
from deepinfer.sampling_params import SamplingParams


class AsyncLLM(FrontDoor):
    """A model that streams to any number of coroutines of one or several event loops.

    Args: those of :class:`deepinfer.config.EngineConfig`, as for ``LLM``.

    Example:
        >>> async with AsyncLLM("demo") as llm:
        ...     async for output in llm.generate("Hello", SamplingParams(max_tokens=8)):
        ...         print(output.text)
    """

    def _open(self, assembly: Assembly) -> None:
        super()._open(assembly)
        self._streams: dict[str, _Stream] = {}
        self._switchboards: weakref.WeakKeyDictionary[Any, _Switchboard] = (
            weakref.WeakKeyDictionary()
        )

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt; yields as ``output_kind`` says.

        ``cumulative``: everything so far, at least once a step that brought news is seen; steps
        that pass while the caller is busy are folded into one. ``delta``: only what is new.
        ``final_only``: once, at the end. The last output has ``finished`` set. Leaving the
        iterator early (``break`` with ``aclose``, cancellation) frees everything at once.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be honoured.
            DeepInferError: the request failed; the engine and all others go on.
            EngineDeadError, EngineClosedError: there is no engine any more.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        name = request_id if request_id is not None else f"r{next(self._ids)}"
        self._check_free(name)
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data") is not None:
            # On a thread: pictures are decoded and sized there.
            prepared = await asyncio.to_thread(self._prepare, name, prompt, params, priority)
        else:
            prepared = self._prepare(name, prompt, params, priority)
        inner = self._run(name, prepared)
        try:
            async for output in inner:
                yield output
        finally:
            await inner.aclose()

    def stream(self, prepared: Prepared) -> AsyncGenerator[RequestOutput, None]:
        """Run what ``assembly.preparer`` made, on another thread perhaps; else as ``generate``.

        For servers: reading a long prompt does not hold up the event loop then.
        """
        return self._run(prepared.request_id, prepared)

    async def _run(self, name: str, prepared: Prepared) -> AsyncGenerator[RequestOutput, None]:
        self._check_free(name)
        board = self._switchboard()
        stream = _Stream(name, prepared)
        self._streams[name] = stream
        ids = [request.id for request in prepared.requests]
        board.connect(ids, stream)
        try:
            self._driver.submit(prepared.requests, board)
            while (output := await stream.next()) is not None:
                yield output
        finally:
            self._streams.pop(name, None)
            board.disconnect(ids)
            if not stream.ended:
                self._driver.drop(ids, wait=False)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | None = None,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, through the model's chat format; see :meth:`LLM.chat`.

        With ``output_kind`` "delta", ``message`` holds what came since the last output.
        """
        options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            reasoning_effort=reasoning_effort,
            thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=chat_template_kwargs or {},
        )
        # On a thread: pictures are decoded and sized there.
        render = self.assembly.render_chat
        prompt = await asyncio.to_thread(render, messages, options, chat_template)
        inner = self.generate(prompt, sampling_params, request_id, priority=priority)
        try:
            async for output in inner:
                yield output
        finally:
            await inner.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output with ``finish_reason`` "abort".

        An unknown id is ignored: it may just have ended.
        """
        stream = self._streams.get(request_id)
        if stream is not None:
            self._driver.abort(stream.ids)

    def get_num_unfinished_requests(self) -> int:
        """Requests (samples) that have not ended."""
        return self._driver.unfinished

    async def get_metrics(self) -> dict[str, Any]:
        """The engine's counters and the last step's statistics."""
        answer: dict[str, Any] = await asyncio.to_thread(
            self._driver.ask, lambda e: {"counters": e.counters, "stats": e.stats}
        )
        return answer

    async def reset_prefix_cache(self) -> None:
        """Forget all reusable prefixes."""
        await asyncio.to_thread(self._driver.ask, lambda e: e.reset_prefix_cache())

    @property
    def dead_error(self) -> DeepInferError | None:
        """Why nothing can be served any more; None while it can."""
        try:
            self._driver.check()
        except DeepInferError as why:
            return why
        return None

    async def check_health(self) -> None:
        """Raise ``EngineDeadError`` or ``EngineClosedError`` if nothing can be served."""
        self._driver.check()

    async def shutdown(self, timeout: float | None = None) -> None:
        """``close()`` without blocking the event loop."""
        self._finalizer.detach()
        await asyncio.to_thread(self._driver.close, timeout)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    def _check_free(self, name: str) -> None:
        if name in self._streams:
            raise InvalidRequestError(
                f"A request with the id {name!r} is still running.", setting="request_id"
            )

    def _prepare(
        self, name: str, prompt: Prompt, params: SamplingParams, priority: int
    ) -> Prepared:
        """Under another name inside if a request of this name was left a moment ago."""
        prepared = self.assembly.preparer.prepare(name, prompt, params, priority)
        if any(self._driver.knows(request.id) for request in prepared.requests):
            inside = f"{name}~{next(self._ids)}"
            prepared = self.assembly.preparer.prepare(inside, prompt, params, priority)
        return prepared

    def _switchboard(self) -> _Switchboard:
        loop = asyncio.get_running_loop()
        board = self._switchboards.get(loop)
        if board is None:
            board = self._switchboards[loop] = _Switchboard(loop)
        return board


class _Switchboard:
    """The engine's listener for one event loop: one wake-up per step, for all its streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._streams: dict[str, tuple[_Stream, int]] = {}

    def connect(self, ids: Sequence[str], stream: _Stream) -> None:
        for i, name in enumerate(ids):
            self._streams[name] = stream, i

    def disconnect(self, ids: Iterable[str]) -> None:
        for name in ids:
            self._streams.pop(name, None)

    def put(self, deltas: list[Delta]) -> None:
        """On the engine's thread."""
        self._on_loop(self._spread, deltas)

    def fail(self, error: Exception) -> None:
        """On the engine's thread."""
        self._on_loop(self._fail, error)

    def _on_loop(self, call: Any, argument: Any) -> None:
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(call, argument)
        elif call == self._spread:
            raise RuntimeError("the event loop of these requests is closed")

    def _spread(self, deltas: list[Delta]) -> None:
        touched = set()
        for delta in deltas:
            known = self._streams.get(delta.request_id)
            if known is not None:
                stream, i = known
                stream.gathering.add(i, delta)
                touched.add(stream)
        for stream in touched:
            stream.wake()

    def _fail(self, error: Exception) -> None:
        for stream, _ in list(self._streams.values()):
            stream.break_off(error)


class _Stream:
    """One prompt's outputs on their way to its iterator. Lives on one event loop."""

    def __init__(self, name: str, prepared: Prepared) -> None:
        self.gathering = Gathering(
            name,
            prepared.prompt,
            prepared.token_ids,
            len(prepared.requests),
            prepared.params.output_kind,
            prepared.parser,
            prepared.params.logprobs is not None,
        )
        self.ids = [request.id for request in prepared.requests]
        self._final_only = prepared.params.output_kind == "final_only"
        self._news = asyncio.Event()
        self._death: Exception | None = None
        self._told_end = False

    @property
    def ended(self) -> bool:
        """Whether the engine has nothing left of it."""
        return self._death is not None or self.gathering.finished

    def wake(self) -> None:
        if self.gathering.finished or not self._final_only:
            self._news.set()

    def break_off(self, error: Exception) -> None:
        self._death = error
        self._news.set()

    async def next(self) -> RequestOutput | None:
        """The next output, None after the last; raises what ended the request."""
        while not self._told_end:
            await self._news.wait()
            self._news.clear()
            if self._death is not None:
                raise self._death
            if self.gathering.error is not None and self.gathering.finished:
                raise self.gathering.error
            output = self.gathering.output()
            self._told_end = output.finished
            if output.outputs or output.finished:
                return output
        return None
