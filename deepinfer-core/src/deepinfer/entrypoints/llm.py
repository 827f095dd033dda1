"""``LLM``: text in, text out, in the caller's process.

Where you are: the synchronous front door. It prepares prompts (``inputs``), hands requests to the
engine's thread (``driver``), waits, and gathers deltas (``outputs``). ``AsyncLLM`` is the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from deepinfer.api.plan import Delta
from deepinfer.chat import ChatOptions
from deepinfer.chat.interface import ToolChoice
from deepinfer.entrypoints.driver import Gate
from deepinfer.entrypoints.front import FrontDoor
from deepinfer.entrypoints.inputs import Message, Prepared, Prompt, as_list, one_each, shown
from deepinfer.entrypoints.outputs import Gathering, RequestOutput, failed_output
from deepinfer.errors import ConfigError, InvalidRequestError
from deepinfer.sampling_params import SamplingParams


class LLM(FrontDoor):
    """A model, ready to generate.

    The engine lives in this process. ``close()``, leaving a ``with`` block or dropping the object
    gives everything back. Methods may be called from several threads; their requests share
    batches.

    Args: those of :class:`deepinfer.config.EngineConfig`, under the same names. None for
        ``batch_invariant`` leaves it to ``DEEPINFER_BATCH_INVARIANT``.

    Example:
        >>> with LLM("demo") as llm:
        ...     print(llm.generate("The capital of France is")[0].text)
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; results come in the order of the prompts.

        Args:
            prompts: a text, a list of ids, ``{"prompt": …}``, ``{"prompt_token_ids": …}``, or a
                list of these, mixed as you like. Both dictionaries may have
                ``"multi_modal_data": {"image": …}`` beside it.
            sampling_params: one for all or one per prompt; None takes the model's defaults
                (:meth:`get_default_sampling_params`).
            use_tqdm: show a progress bar on standard error.
            priority: one for all or one per prompt; lower runs first under the policy
                ``priority``.

        Returns:
            One output per prompt. Of several prompts, one that fails or is invalid does not take
            the others along: its output has ``finish_reason`` "error" and the cause in ``error``.

        Raises:
            InvalidRequestError: the only prompt given is invalid, or numbers do not match.
            EngineClosedError, EngineDeadError: there is no engine (any more).
            KeyboardInterrupt: all requests of this call are gone then, the engine is usable.
        """
        return self._generate(as_list(prompts), sampling_params, priority, use_tqdm)

    def _generate(
        self,
        asked: Sequence[Prompt | InvalidRequestError],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run prompts; one that is an error already takes its place among the outputs."""
        self._driver.check()
        params = one_each("sampling_params", sampling_params, SamplingParams, len(asked))
        ranks = one_each("priority", priority, int, len(asked))
        first = next(self._ids)
        call = _Call(len(asked))
        for i, (prompt, wish, rank) in enumerate(zip(asked, params, ranks, strict=True)):
            name = f"{first}-{i}"
            try:
                if isinstance(prompt, InvalidRequestError):
                    raise prompt
                wish = self.get_default_sampling_params() if wish is None else wish
                prepared = self.assembly.preparer.prepare(name, prompt, wish, rank, stream=False)
                call.take(i, prepared)
            except InvalidRequestError as why:
                if len(asked) == 1:
                    raise
                call.refuse(i, name, prompt, why)
        outputs = self._run(call, use_tqdm)
        if len(outputs) == 1 and isinstance(outputs[0].error, InvalidRequestError | ConfigError):
            raise outputs[0].error  # refused by the engine, not broken while it ran
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice | None = None,
        response_format: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat format.

        Where the format can read its model's answers, ``outputs[i].message`` holds the parts:
        ``reasoning_content``, ``content``, ``tool_calls``. What the format does not have is
        refused by name.

        Args:
            messages: ``[{"role": "user", "content": "…"}]``, or a list of such lists. Where the
                model sees, content may be a list of parts, ``{"type": "text", "text": "…"}`` and
                ``{"type": "image", "image": …}``: a path, the encoded picture as bytes, its data
                URL, or an image of Pillow. ``image_url`` parts are taken too.
            add_generation_prompt: end with the mark that opens the assistant's answer.
            chat_template: a Jinja template in place of the model's own format.
            tools: JSON descriptions of the functions that the model may call.
            tool_choice: ``auto``, ``none``, ``required`` or a function's name, as OpenAI spells it.
            response_format: ``json_object`` and ``json_schema`` force the answer, as
                ``SamplingParams.so_args`` does, and are shown to the model where its format can.
            reasoning_effort: how long to think, in the words of the model's format.
            enable_thinking: whether to think; None is the format's default.
            chat_template_kwargs: further variables of the format.
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
        asked: list[Prompt | InvalidRequestError] = []
        for talk in _conversations(messages):
            try:
                asked.append(self.assembly.render_chat(talk, options, chat_template))
            except InvalidRequestError as why:
                asked.append(why)
        return self._generate(asked, sampling_params, None, use_tqdm)

    def get_metrics(self) -> dict[str, Any]:
        """The engine's counters and the last step's statistics."""
        metrics: dict[str, Any] = self._driver.ask(_metrics)
        return metrics

    def reset_prefix_cache(self) -> None:
        """Forget all reusable prefixes."""
        self._driver.ask(lambda engine: engine.reset_prefix_cache())

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, call: _Call, use_tqdm: bool) -> list[RequestOutput]:
        try:
            if call.requests:
                self._driver.submit(call.requests, call)
                call.wait(use_tqdm)
        except BaseException:  # Ctrl-C above all: nothing of this call may stay behind
            self._driver.drop([request.id for request in call.requests], wait=True)
            raise
        return call.results()


def _conversations(messages: Any) -> list[Any]:
    """One conversation or several; what is neither is left for the chat format to refuse."""
    several = isinstance(messages, Sequence) and not isinstance(messages, str) and bool(messages)
    return list(messages) if several and not isinstance(messages[0], Mapping) else [messages]


def _metrics(engine: Any) -> dict[str, Any]:
    return {"counters": engine.counters, "stats": engine.stats}


class _Call:
    """One ``generate`` call: gathers on the engine's thread, waits on the caller's."""

    def __init__(self, count: int) -> None:
        self._slots: list[Gathering | RequestOutput | None] = [None] * count
        self._parts: dict[str, tuple[Gathering, int]] = {}
        self._left: set[str] = set()
        self._done = Gate()
        self._death: Exception | None = None
        self.requests: list[Any] = []

    def take(self, place: int, prepared: Prepared) -> None:
        """A prompt that will run."""
        gathering = Gathering(
            prepared.request_id,
            prepared.prompt,
            prepared.token_ids,
            len(prepared.requests),
            parser=prepared.parser,
            logprobs=prepared.params.logprobs is not None,
        )
        self._slots[place] = gathering
        for i, request in enumerate(prepared.requests):
            self._parts[request.id] = gathering, i
            self._left.add(request.id)
            self.requests.append(request)

    def refuse(self, place: int, name: str, prompt: Any, why: Exception) -> None:
        """A prompt that cannot run."""
        self._slots[place] = failed_output(name, shown(prompt), (), why)

    def put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            gathering, i = self._parts[delta.request_id]
            gathering.add(i, delta)
            if delta.finish is not None:
                self._left.discard(delta.request_id)
        if not self._left:
            self._done.open()

    def fail(self, error: Exception) -> None:
        self._death = error
        self._done.open()

    def wait(self, show: bool) -> None:
        """Until every request has ended; the caller's Ctrl-C lands here."""
        if show:
            from deepinfer.entrypoints.progress import Bar

            with Bar(len(self._parts), "generating", "seq") as bar:
                while not self._done.wait(0.1):
                    bar.show(len(self._parts) - len(self._left))
                bar.show(len(self._parts))
        else:
            self._done.wait()
        if self._death is not None:
            raise self._death

    def results(self) -> list[RequestOutput]:
        """In the order of the prompts."""
        return [s.output() if isinstance(s, Gathering) else s for s in self._every()]

    def _every(self) -> Iterable[Gathering | RequestOutput]:
        for slot in self._slots:
            assert slot is not None, "a prompt was neither taken nor refused"
            yield slot
