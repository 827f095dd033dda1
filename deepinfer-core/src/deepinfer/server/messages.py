"""``POST /v1/messages``, as Anthropic's clients know it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from deepinfer.chat.interface import ChatOptions
from deepinfer.errors import InvalidRequestError
from deepinfer.sampling_params import SamplingParams
from deepinfer.server.blocks import Block, Blocks, pieces_of
from deepinfer.server.errors import error_body
from deepinfer.server.exchange import event
from deepinfer.server.schemas_blocks import CountTokensBody, MessagesBody
from deepinfer.server.service import Asked, Run, Service
from deepinfer.server.talk import checked_prefix, plain_message

if TYPE_CHECKING:
    from deepinfer.entrypoints.outputs import RequestOutput

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_THINKING: Final[dict[str | None, bool]] = {"enabled": True, "disabled": False}
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """The dialect: blocks in, blocks out."""

    prefix = "msg_"

    def asked(self, body: dict[str, Any], service: Service) -> Asked:
        wish = MessagesBody.read(body)
        service.check_model(wish.model)
        said = wish.said()
        talk = conversation(said)
        checked_prefix(talk, service)
        base = service.llm.get_default_sampling_params().model_dump(exclude_unset=True)
        given: dict[str, Any] = {
            k: said[k] for k in ("max_tokens", "temperature", "top_p", "top_k") if k in said
        }
        kind = "delta" if wish.stream else "final_only"
        given.update(stop=said.get("stop_sequences", ()), output_kind=kind)
        return Asked(
            params=SamplingParams(**{**base, **given}),
            writer=lambda run: MessagesWriter(run, service.names[0]),
            messages=talk,
            options=options(said),
            stream=bool(wish.stream),
            ignored=wish.ignored(),
        )


def conversation(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Anthropic's messages as the messages of chat formats."""
    talk: list[dict[str, Any]] = []
    if said.get("system"):
        talk.append(plain_message({"role": "system", "content": said["system"]}))
    for message in said["messages"]:
        content = message["content"]
        if isinstance(content, str):
            talk.append({"role": message["role"], "content": content})
        elif message["role"] == "user":
            talk += _of_user(content)
        else:
            talk.append(_of_assistant(content))
    if talk[-1]["role"] == "assistant":
        talk[-1]["prefix"] = True  # the answer continues it
    return talk


def _of_user(blocks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            yield plain_message({"role": "user", "content": parts})
            parts = []
        content = block.get("content", "")
        if isinstance(content, list):
            content = [_part(part) for part in content]
        result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
        yield plain_message(result)
    if parts:
        yield plain_message({"role": "user", "content": parts})


def _part(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block["source"]
    url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _of_assistant(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [b["text"] for b in blocks if b["type"] == "text"]
    thoughts = [b["thinking"] for b in blocks if b["type"] == "thinking"]
    calls = [b for b in blocks if b["type"] == "tool_use"]
    if texts or not calls:
        message["content"] = "\n\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
    return message


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block["input"], ensure_ascii=False)
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def options(said: dict[str, Any]) -> ChatOptions:
    """Tools and thinking."""
    choice = said.get("tool_choice")
    wanted: Any = None
    if choice is not None:
        if not said.get("tools"):
            raise InvalidRequestError("tool_choice needs tools.", setting="tool_choice")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        wanted = _CHOICES.get(choice["type"], named)
    kind = said.get("thinking", {}).get("type")
    return ChatOptions(
        tools=[_tool(tool) for tool in said.get("tools", ())] or None,
        tool_choice=wanted,
        thinking=_THINKING.get(kind),
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def count_tokens(body: dict[str, Any], service: Service) -> dict[str, Any]:
    """``POST /v1/messages/count_tokens``. On a thread."""
    wish = CountTokensBody.read(body)
    service.check_model(wish.model)
    said = wish.said()
    talk = conversation(said)
    checked_prefix(talk, service)
    prompt = service.llm.assembly.render_chat(talk, options(said))
    return {"input_tokens": len(prompt["prompt_token_ids"])}


class MessagesWriter:
    """Its answers."""

    def __init__(self, run: Run, model: str) -> None:
        self._run = run
        self._model = model
        self._blocks = Blocks()
        self._reason: str | None = None
        self._sequence: str | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        self.news(0, outputs[0])
        self._blocks.close()
        found = [self._block(block) for block in self._blocks.done]
        return {**self._message(found), **self._stopped(), "usage": self._usage()}

    def begin(self) -> list[str]:
        message = {**self._message([]), **self._stopped(), "usage": self._usage()}
        return [_event({"type": "message_start", "message": message}), _event({"type": "ping"})]

    def news(self, number: int, output: RequestOutput) -> list[str]:
        events = []
        for out in output.outputs:
            for piece in pieces_of(out):
                closed, block, fresh = self._blocks.feed(piece)
                events += [*self._ended(closed), *self._started(block if fresh else None)]
                if piece.text:
                    events.append(_delta(block.index, _DELTAS[block.kind], piece.text))
            if out.finish_reason is not None:
                stop = out.stop_reason
                self._sequence = stop if isinstance(stop, str) else None
                self._reason = _REASONS.get(out.finish_reason, out.finish_reason)
                if self._sequence is not None:
                    self._reason = "stop_sequence"
        return events

    def end(self) -> list[str]:
        closed = self._ended(self._blocks.close())
        last = {"type": "message_delta", "delta": self._stopped(), "usage": self._usage()}
        return [*closed, _event(last), _event({"type": "message_stop"})]

    def failed(self, error: BaseException) -> list[str]:
        return [event(error_body(error, anthropic=True), "error")]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self._run.id, "type": "message", "role": "assistant"}
        return {**about, "model": self._model, "content": content}

    def _stopped(self) -> dict[str, Any]:
        return {"stop_reason": self._reason, "stop_sequence": self._sequence}

    def _usage(self) -> dict[str, int]:
        used = self._run.usage
        return {
            "input_tokens": used.prompt - used.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": used.cached,
            "output_tokens": used.output,
        }

    def _started(self, block: Block | None) -> list[str]:
        if block is None:
            return []
        empty = Block(block.index, block.kind, block.call, block.id, block.name)
        start = {"type": "content_block_start", "index": block.index}
        return [_event({**start, "content_block": self._block(empty)})]

    def _ended(self, block: Block | None) -> list[str]:
        if block is None:
            return []
        events = []
        if block.kind == "reasoning":
            events.append(_delta(block.index, ("signature_delta", "signature"), self._run.id))
        return [*events, _event({"type": "content_block_stop", "index": block.index})]

    def _block(self, block: Block) -> dict[str, Any]:
        if block.kind == "content":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            signature = self._run.id if block.parts else ""
            return {"type": "thinking", "thinking": block.text, "signature": signature}
        found = {"type": "tool_use", "id": block.id, "name": block.name}
        return {**found, "input": _input(block.text)}


_DELTAS: Final = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _delta(index: int, kind: tuple[str, str], text: str) -> str:
    delta = {"type": kind[0], kind[1]: text}
    return _event({"type": "content_block_delta", "index": index, "delta": delta})


def _event(data: dict[str, Any]) -> str:
    return event(data, data["type"])


def _input(arguments: str) -> Any:
    """A call's arguments; broken or cut ones are shown as they are, under ``raw``."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"raw": arguments}
