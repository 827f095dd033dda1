"""A conversation and its wishes as the body that ``deepseek-recipe`` reads.

Where you are: in front of ``deepseek``. The recipe passes over what it does not know; here every
field is either one that it honours or refused by name.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.chat.images import image_of
from deepinfer.chat.interface import ChatImage, ChatOptions, Message
from deepinfer.chat.messages import refuse
from deepinfer.errors import InvalidRequestError

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
TASKS: Final = ("action", "query", "authority", "domain", "title", "read_url")

_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "assistant": ("reasoning_content", "tool_calls", "prefix"),
    "tool": ("tool_call_id",),
}
_KWARGS: Final = ("enable_thinking", "thinking", "reasoning_effort", "task")
_FORMAT: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
}
_DETAILS: Final = (None, "auto", "high", "original")


@dataclass(frozen=True, slots=True)
class Asked:
    """The body's fields beside the messages, and the internal task if one is asked."""

    body: dict[str, Any]
    task: str | None


def checked_options(options: ChatOptions, name: str) -> Asked:
    """The wishes in the recipe's words.

    Raises:
        InvalidRequestError: naming one that the format does not have.
    """
    extra = dict(options.template_kwargs)
    for key in extra:
        if key not in _KWARGS:
            raise InvalidRequestError(
                f"The chat format of {name} does not know {key}; it knows {', '.join(_KWARGS)}.",
                setting=key,
            )
    thinking = _one("thinking", options.thinking, extra.get("thinking"))
    thinking = _one("enable_thinking", thinking, extra.get("enable_thinking"))
    if thinking is not None and not isinstance(thinking, bool):
        raise InvalidRequestError(f"thinking={thinking!r} is no bool.", setting="thinking")
    task = extra.get("task")
    if task is not None and task not in TASKS:
        raise InvalidRequestError(
            f"task={task!r} is unknown; known are {', '.join(TASKS)}.", setting="task"
        )
    named = {
        "thinking": None if thinking is None else {"type": _switch(thinking)},
        "reasoning_effort": _one(
            "reasoning_effort", options.reasoning_effort, extra.get("reasoning_effort")
        ),
        "tools": _tools(options.tools),
        "tool_choice": _tool_choice(options),
        "response_format": _response_format(options.response_format),
    }
    return Asked({key: value for key, value in named.items() if value is not None}, task)


def _switch(on: bool) -> str:
    return "enabled" if on else "disabled"


def _one(name: str, first: Any, second: Any) -> Any:
    """The one that is given."""
    if None not in (first, second) and first != second:
        raise InvalidRequestError(
            f"{name} is given twice, as {first!r} and {second!r}.", setting=name
        )
    return second if first is None else first


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    for index, tool in enumerate(tools):
        _only(f"tools[{index}]", tool, ("type", "function"))
        _only(
            f"tools[{index}].function",
            tool.get("function"),
            ("name", "description", "parameters", "strict"),
        )
    return [{**tool, "function": dict(tool["function"])} for tool in tools]


def _tool_choice(options: ChatOptions) -> Any:
    choice = options.tool_choice
    if choice in (None, "auto", "none"):
        return choice
    if not options.tools:
        raise InvalidRequestError(f"tool_choice={choice!r} needs tools.", setting="tool_choice")
    if isinstance(choice, Mapping):
        _only("tool_choice", choice, ("type", "function"))
        _only("tool_choice.function", choice.get("function"), ("name",))
    return choice


def _response_format(wish: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if wish is None:
        return None
    kind = str(wish.get("type")) if isinstance(wish, Mapping) else "none"
    if kind not in _FORMAT:
        raise InvalidRequestError(
            f"response_format must have a type of {', '.join(_FORMAT)}, not {kind!r}.",
            setting="response_format",
        )
    _only("response_format", wish, ("type", *_FORMAT[kind]))
    if kind == "json_schema":
        _only("response_format.json_schema", wish.get(kind), ("name", "schema", "strict"))
    return dict(wish)


def _only(where: str, given: Any, known: Sequence[str]) -> None:
    """Refuse fields that would be passed over."""
    if not isinstance(given, Mapping):
        refuse(where, f"must be a mapping, not {type(given).__name__}")
    for key, value in given.items():
        if key not in known and value is not None:
            refuse(where, f"has {key!r}, which this chat format does not have")


def check_parts(where: str, content: Any) -> None:
    """Content that is no text: a list of parts."""
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        refuse(where, f"has content of type {type(content).__name__}; a str or a list of parts")
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image_url", "image"):
            refuse(place, f"has the type {kind!r}; known are text, image_url and image")
        _only(place, part, ("type", kind))
        if kind == "text" and not isinstance(part.get("text"), str):
            refuse(place, "has no text")


def request_messages(
    messages: Sequence[Message], image_token: str | None
) -> tuple[list[dict[str, Any]], list[ChatImage]]:
    """The messages with images replaced by stand-ins, and the images."""
    images: list[ChatImage] = []
    talk = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        _only(where, message, ("role", "content", *_FIELDS.get(message["role"], ())))
        copy = {key: value for key, value in message.items() if value is not None}
        if "content" in copy:
            copy["content"] = _content(where, copy["content"], image_token, images)
        if "tool_calls" in copy:
            copy["tool_calls"] = _calls(where, copy["tool_calls"])
        talk.append(copy)
    return talk, images


def _content(where: str, content: Any, token: str | None, images: list[ChatImage]) -> Any:
    if isinstance(content, str):
        return _text(where, content, token)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if part["type"] == "text":
            parts.append({"type": "text", "text": _text(place, part["text"], token)})
            continue
        if token is None:
            refuse(place, "is an image, which this model does not see")
        parts.append({"type": "image_url", "image_url": {"url": stand_in(len(images))}})
        images.append(_image(place, part))
    return parts


def _text(where: str, text: str, token: str | None) -> str:
    if token is not None and token in text:
        refuse(where, f"spells {token}, which only stands for an image")
    return text


def stand_in(index: int) -> str:
    """An address that the recipe takes for an image and gives back in the prompt's order."""
    return f"data:image/png;base64,{base64.b64encode(index.to_bytes(6, 'big')).decode()}"


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as text, as the recipe wants them."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        refuse(where, "has tool_calls that are no list")
    found = []
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}]"
        _only(place, call, ("id", "type", "function", "index"))
        _only(f"{place}.function", call.get("function"), ("name", "arguments"))
        function = dict(call["function"])
        if isinstance(function.get("arguments"), Mapping):
            function["arguments"] = _as_json(f"{place}.function", function["arguments"])
        found.append({**{k: v for k, v in call.items() if k != "index"}, "function": function})
    return found


def _as_json(where: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as why:
        refuse(where, f"has arguments that are no JSON: {why}")


def _image(where: str, part: Mapping[str, Any]) -> ChatImage:
    """``image_url`` holds an address, as OpenAI has it; ``image`` what ``image_of`` takes."""
    given = part.get(part["type"])
    if isinstance(given, Mapping):
        _only(where, given, ("url", "detail"))
        if given.get("detail") not in _DETAILS:
            refuse(where, f"has detail={given['detail']!r}; images are taken as they are")
        given = given.get("url")
    return image_of(where, given)
