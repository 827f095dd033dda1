"""``POST /v1/responses``, as OpenAI's newer clients know it. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from deepinfer.chat.interface import ChatOptions
from deepinfer.entrypoints.bodies import body_params
from deepinfer.server.blocks import Block, Blocks, pieces_of
from deepinfer.server.errors import error_body
from deepinfer.server.exchange import event
from deepinfer.server.schemas_blocks import ResponsesBody
from deepinfer.server.service import Asked, Run, Service
from deepinfer.server.talk import plain_message

if TYPE_CHECKING:
    from deepinfer.entrypoints.outputs import RequestOutput

_INSTRUCTED: Final = "system"


class Responses:
    """The dialect: items in, items out."""

    prefix = "resp_"

    def asked(self, body: dict[str, Any], service: Service) -> Asked:
        wish = ResponsesBody.read(body)
        service.check_model(wish.model)
        said = wish.said()
        form = _format(said)
        plain: dict[str, Any] = {
            "max_tokens": said.get("max_output_tokens"),
            "response_format": form,
            **{k: said[k] for k in ("temperature", "top_p") if k in said},
        }
        params = body_params(plain, service.llm.get_default_sampling_params(), chat=True)
        kind = "delta" if wish.stream else "final_only"
        return Asked(
            params=params.model_copy(update={"output_kind": kind}),
            writer=lambda run: ResponsesWriter(run, wish, service.names[0]),
            messages=conversation(said),
            options=_options(said, form),
            stream=bool(wish.stream),
            ignored=wish.ignored(),
        )


def conversation(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Items as the messages of chat formats. What an assistant thought, said and called in a row
    is one message of its."""
    talk: list[dict[str, Any]] = []
    if said.get("instructions"):
        talk.append({"role": _INSTRUCTED, "content": said["instructions"]})
    items = said["input"]
    if isinstance(items, str):
        return [*talk, {"role": "user", "content": items}]
    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and item["role"] != "assistant":
            talk.append(_message(item["role"], item["content"]))
        elif kind == "function_call_output":
            message = _message("tool", item["output"])
            talk.append({**message, "tool_call_id": item["call_id"]})
        else:
            _add(_turn(talk, kind), kind, item)
    return talk


def _message(role: str, content: Any) -> dict[str, Any]:
    if isinstance(content, list):
        content = [_part(part) for part in content]
    return plain_message({"role": role, "content": content})


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "input_image":
        return {"type": "text", "text": part["text"]}
    image = {"url": part["image_url"], **({"detail": part["detail"]} if "detail" in part else {})}
    return {"type": "image_url", "image_url": image}


def _turn(talk: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The assistant's message that an item belongs to."""
    last = talk[-1] if talk and talk[-1]["role"] == "assistant" else None
    if last is None or kind == "reasoning" or (kind == "message" and "content" in last):
        last = {"role": "assistant"}
        talk.append(last)
    return last


def _add(message: dict[str, Any], kind: str, item: dict[str, Any]) -> None:
    if kind == "message":
        message["content"] = _message("assistant", item["content"])["content"]
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        thoughts = [part["text"] for part in item.get("content", ())]
        message["reasoning_content"] = "\n\n".join(thoughts)
        message.setdefault("content", "")


def _format(said: dict[str, Any]) -> dict[str, Any] | None:
    """``text.format`` as ``response_format``."""
    form = said.get("text", {}).get("format")
    if form is None or form["type"] != "json_schema":
        found: dict[str, Any] | None = form
        return found
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def _options(said: dict[str, Any], form: dict[str, Any] | None) -> ChatOptions:
    choice = said.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in said.get("tools", ())
    ]
    return ChatOptions(
        tools=tools or None,
        tool_choice=choice,
        response_format=form,
        format_is_forced=True,
        reasoning_effort=said.get("reasoning", {}).get("effort"),
    )


class ResponsesWriter:
    """Its answers."""

    def __init__(self, run: Run, wish: ResponsesBody, model: str) -> None:
        self._run = run
        self._echo = _echo(wish, model)
        self._created = int(time.time())
        self._blocks = Blocks()
        self._number = 0
        self._finish: str | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        self.news(0, outputs[0])
        self._blocks.close()
        return self._response(self._ending())

    def begin(self) -> list[str]:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def news(self, number: int, output: RequestOutput) -> list[str]:
        events: list[str] = []
        for out in output.outputs:
            for piece in pieces_of(out):
                closed, block, fresh = self._blocks.feed(piece)
                events += [*self._ended(closed), *self._started(block if fresh else None)]
                if piece.text:
                    events.append(self._delta(block, piece.text))
            self._finish = out.finish_reason or self._finish
        return events

    def end(self) -> list[str]:
        events = self._ended(self._blocks.close())
        ending = self._ending()
        last = self._event(f"response.{ending}", response=self._response(ending))
        return [*events, last]

    def failed(self, error: BaseException) -> list[str]:
        inner = error_body(error)["error"]
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": inner["message"]}
        return [self._event("response.failed", response=response)]

    def _ending(self) -> str:
        return "completed" if self._finish in ("stop", "tool_calls") else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        reason = {"length": "max_output_tokens"}.get(self._finish or "", self._finish)
        return {
            "id": self._run.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            **self._echo,
            "output": [self._item(b, "completed") for b in self._blocks.done] if over else [],
            "usage": self._usage() if over else None,
        }

    def _usage(self) -> dict[str, Any]:
        used = self._run.usage
        return {
            "input_tokens": used.prompt,
            "input_tokens_details": {"cached_tokens": used.cached},
            "output_tokens": used.output,
            "total_tokens": used.prompt + used.output,
        }

    def _event(self, kind: str, **data: Any) -> str:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, **data, "sequence_number": number}, kind)

    def _where(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index}

    def _id(self, block: Block) -> str:
        kind = {"content": "msg", "reasoning": "rs"}.get(block.kind, "fc")
        return f"{kind}_{self._run.id.removeprefix('resp_')}_{block.index}"

    def _started(self, block: Block | None) -> list[str]:
        if block is None:
            return []
        empty = Block(block.index, block.kind, block.call, block.id, block.name)
        item = self._item(empty, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "tool_call":
            return [added]
        where = {**self._where(block), "content_index": 0}
        part = self._event("response.content_part.added", **where, part=_text(block.kind, ""))
        return [added, part]

    def _delta(self, block: Block, text: str) -> str:
        where = self._where(block)
        if block.kind == "tool_call":
            return self._event("response.function_call_arguments.delta", **where, delta=text)
        more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        name = f"response.{_text(block.kind, '')['type']}.delta"
        return self._event(name, **where, content_index=0, delta=text, **more)

    def _ended(self, block: Block | None) -> list[str]:
        if block is None:
            return []
        where, text = self._where(block), block.text
        item = self._item(block, "completed")
        done = {"output_index": block.index, "item": item}
        if block.kind == "tool_call":
            name = "response.function_call_arguments.done"
            first = [self._event(name, **where, arguments=text, name=block.name)]
        else:
            part = _text(block.kind, text)
            more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
            name = f"response.{part['type']}.done"
            where = {**where, "content_index": 0}
            first = [
                self._event(name, **where, text=text, **more),
                self._event("response.content_part.done", **where, part=part),
            ]
        return [*first, self._event("response.output_item.done", **done)]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        about = {"id": self._id(block), "status": status}
        if block.kind == "tool_call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **about, **call}
        content = [_text(block.kind, block.text)] if block.parts else []
        if block.kind == "reasoning":
            return {"type": "reasoning", **about, "summary": [], "content": content}
        return {"type": "message", **about, "role": "assistant", "content": content}


def _text(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}


def _echo(wish: ResponsesBody, model: str) -> dict[str, Any]:
    """What a response repeats of its request."""
    given = wish.model_dump(by_alias=True, exclude_none=True)
    return {
        "model": model,
        "instructions": wish.instructions,
        "max_output_tokens": wish.max_output_tokens,
        "metadata": wish.metadata or {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": given.get("reasoning", {"effort": None, "summary": None}),
        "store": False,
        "temperature": wish.temperature,
        "text": given.get("text", {"format": {"type": "text"}}),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": wish.top_p,
        "truncation": "disabled",
        "user": wish.user,
    }
