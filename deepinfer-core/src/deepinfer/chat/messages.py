"""Whether messages are well formed, before any format sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from deepinfer.chat.interface import Message
from deepinfer.errors import InvalidRequestError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def check_messages(
    messages: Sequence[Message],
    roles: Sequence[str] = ROLES,
    content: Callable[[str, Any], None] | None = None,
) -> Sequence[Message]:
    """Return the messages if they are well formed.

    Args:
        messages: what the caller gave.
        roles: those that the format knows.
        content: checks content that is no text, given where it stands; without it, text it must be.

    Raises:
        InvalidRequestError: naming ``messages[i]`` and what is wrong with it.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a list of messages, not {type(messages).__name__}.",
            setting="messages",
        )
    if not messages:
        raise InvalidRequestError("messages is empty.", setting="messages")
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message, roles, content)
    return messages


def _check_message(
    where: str,
    message: Any,
    roles: Sequence[str],
    check_content: Callable[[str, Any], None] | None,
) -> None:
    if not isinstance(message, Mapping):
        refuse(where, f"must be a mapping with role and content, not {type(message).__name__}")
    role = message.get("role")
    if role is None:
        refuse(where, "has no role")
    if role not in roles:
        refuse(where, f"has the unknown role {role!r}; known are {', '.join(roles)}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return
    if content is None:
        refuse(where, "has no content")
    if isinstance(content, str):
        return
    if check_content is None:
        _refuse_images(where, content)
        refuse(
            where,
            f"has content of type {type(content).__name__}; it must be a str",
            "Join the text parts into one string.",
        )
    check_content(where, content)


def _refuse_images(where: str, content: Any) -> None:
    for index, part in enumerate(content if isinstance(content, list | tuple) else ()):
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            refuse(f"{where}.content[{index}]", "is an image, which this model does not take")


def refuse(where: str, what: str, next_step: str | None = None) -> NoReturn:
    """Raise what is wrong with a part of the messages."""
    raise InvalidRequestError(f"{where} {what}.", setting=where, next_step=next_step)
