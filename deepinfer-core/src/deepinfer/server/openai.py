"""``/v1/completions`` and ``/v1/chat/completions``, as OpenAI's clients know them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.entrypoints.bodies import body_params, chat_options
from deepinfer.server.errors import error_body
from deepinfer.server.exchange import event
from deepinfer.server.schemas import ChatBody, CompletionBody, OpenAISampling
from deepinfer.server.service import Asked, Run, Service
from deepinfer.server.talk import checked_prefix, plain_message
from deepinfer.server.tools import as_prompts, chat_logprobs, text_logprobs, usage

if TYPE_CHECKING:
    from deepinfer.entrypoints.outputs import CompletionOutput, RequestOutput

# What the server does itself, and bodies of a batch may not ask.
_OURS = ("stream", "stream_options")


def _params(said: dict[str, Any], service: Service, chat: bool) -> Any:
    body = {k: v for k, v in said.items() if k not in _OURS}
    base = service.llm.get_default_sampling_params()
    kind = "delta" if said.get("stream") else "final_only"
    return body_params(body, base, chat).model_copy(update={"output_kind": kind})


class Completions:
    """Texts in, texts out."""

    prefix = "cmpl-"

    def asked(self, body: dict[str, Any], service: Service) -> Asked:
        wish = CompletionBody.read(body)
        service.check_model(wish.model)
        said = wish.said()
        for name in ("echo", "best_of"):
            said.pop(name, None)
        return Asked(
            params=_params(said, service, chat=False),
            writer=lambda run: CompletionWriter(run, wish, service),
            prompts=as_prompts(wish.prompt),
            stream=bool(wish.stream),
            ignored=wish.ignored(),
        )


class Chat:
    """Conversations in, messages out."""

    prefix = "chatcmpl-"

    def asked(self, body: dict[str, Any], service: Service) -> Asked:
        wish = ChatBody.read(body)
        service.check_model(wish.model)
        said = wish.said()
        talk = [plain_message(message) for message in said["messages"]]
        checked_prefix(talk, service)
        return Asked(
            params=_params(said, service, chat=True),
            writer=lambda run: ChatWriter(run, wish, service),
            messages=talk,
            options=chat_options(said),
            stream=bool(wish.stream),
            ignored=wish.ignored(),
        )


class _Writer(ABC):
    """What answers of both routes share.

    Args:
        run: the request.
        wish: its body.
        service: knows the model's name and its tokens.
    """

    kind = ""
    piece = ""

    def __init__(self, run: Run, wish: OpenAISampling, service: Service) -> None:
        self._run = run
        self._tokenizer = service.llm.assembly.tokenizer
        self._model = service.names[0]
        self._created = int(time.time())
        self._samples = run.asked.params.n
        options = wish.stream_options
        self._with_usage = options is not None and bool(options.include_usage)

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._run.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(number * self._samples + out.index, out)
            for number, output in enumerate(outputs)
            for out in output.outputs
        ]
        return {**self._answer(self.kind, choices), "usage": usage(self._run)}

    def begin(self) -> list[str]:
        """Nothing stands before the first piece."""
        return []

    def news(self, number: int, output: RequestOutput) -> list[str]:
        """Pieces, one for each sample that said something."""
        return [
            self._event([delta])
            for out in output.outputs
            for delta in self._deltas(number * self._samples + out.index, out)
        ]

    def end(self) -> list[str]:
        """The usage if it was asked for, and the mark of the end."""
        last = {**self._answer(self.piece, []), "usage": usage(self._run)}
        return [*([event(last)] if self._with_usage else []), event("[DONE]")]

    def failed(self, error: BaseException) -> list[str]:
        """The error as an event of its own."""
        return [event(error_body(error)), event("[DONE]")]

    def _event(self, choices: list[dict[str, Any]]) -> str:
        answer = self._answer(self.piece, choices)
        return event({**answer, "usage": None} if self._with_usage else answer)

    @abstractmethod
    def _choice(self, index: int, out: CompletionOutput) -> dict[str, Any]:
        """A sample of an answer in one piece."""

    @abstractmethod
    def _deltas(self, index: int, out: CompletionOutput) -> Iterator[dict[str, Any]]:
        """What a stream says of a sample's news."""


class CompletionWriter(_Writer):
    """Answers of ``/v1/completions``."""

    kind = piece = "text_completion"

    def __init__(self, run: Run, wish: CompletionBody, service: Service) -> None:
        super().__init__(run, wish, service)
        self._most = wish.logprobs
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, out: CompletionOutput) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "text": out.text,
            "logprobs": None,
            "finish_reason": out.finish_reason,
            "stop_reason": out.stop_reason,
        }
        if self._most is not None and out.logprobs is not None:
            start = self._offsets.get(index, 0)
            found["logprobs"], self._offsets[index] = text_logprobs(out, self._most, start)
        return found

    def _deltas(self, index: int, out: CompletionOutput) -> Iterator[dict[str, Any]]:
        if out.text or out.finish_reason or (self._most is not None and out.logprobs):
            yield self._choice(index, out)


class ChatWriter(_Writer):
    """Answers of ``/v1/chat/completions``; ``reasoning_content`` is DeepSeek's name."""

    kind, piece = "chat.completion", "chat.completion.chunk"

    def __init__(self, run: Run, wish: ChatBody, service: Service) -> None:
        super().__init__(run, wish, service)
        self._most = (wish.top_logprobs or 0) if wish.logprobs else None
        self._begun: set[int] = set()

    def _choice(self, index: int, out: CompletionOutput) -> dict[str, Any]:
        said = {"role": "assistant", "content": out.text}
        return {
            "index": index,
            "message": said if out.message is None else out.message.as_dict(),
            "logprobs": self._logprobs(out),
            "finish_reason": out.finish_reason,
            "stop_reason": out.stop_reason,
        }

    def _logprobs(self, out: CompletionOutput) -> dict[str, Any] | None:
        if self._most is None or not out.logprobs:
            return None
        return {"content": chat_logprobs(out, self._most, self._tokenizer)}

    def _deltas(self, index: int, out: CompletionOutput) -> Iterator[dict[str, Any]]:
        delta = _new(out)
        logprobs = self._logprobs(out)
        if not delta and logprobs is None and out.finish_reason is None:
            return
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": None if "tool_calls" in delta else "", **delta}
        found = {"index": index, "delta": delta, "logprobs": logprobs}
        if out.finish_reason is None:
            yield {**found, "finish_reason": None}
            return
        if delta:
            yield {**found, "finish_reason": None}
            found = {"index": index, "delta": {}, "logprobs": None}
        yield {**found, "finish_reason": out.finish_reason, "stop_reason": out.stop_reason}


def _new(out: CompletionOutput) -> dict[str, Any]:
    """What a piece of a message holds; nothing that is empty."""
    if out.message is None:
        return {"content": out.text} if out.text else {}
    found: dict[str, Any] = {}
    if out.message.reasoning_content:
        found["reasoning_content"] = out.message.reasoning_content
    if out.message.content:
        found["content"] = out.message.content
    if out.message.tool_calls:
        found["tool_calls"] = [_new_call(call) for call in out.message.tool_calls]
    return found


def _new_call(call: Any) -> dict[str, Any]:
    """The first piece of a call has its name; later ones only continue the arguments."""
    function = {"arguments": call.arguments}
    if not call.name:
        return {"index": call.index, "function": function}
    whole = {"name": call.name, **function}
    return {"index": call.index, "id": call.id, "type": "function", "function": whole}
