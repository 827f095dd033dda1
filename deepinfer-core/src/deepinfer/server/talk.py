"""A client's messages in the words of chat formats, whatever route they came by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.chat.deepseek import GENERATIONS
from deepinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from deepinfer.server.service import Service


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message in the words of chat formats: parts that are all text are one text.

    They are joined as DeepSeek's own API joins them, by an empty line.
    """
    left = {k: v for k, v in message.items() if k not in ("name", "annotations")}
    content = left.get("content")
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        left["content"] = "\n\n".join(part["text"] for part in content)
    return left


def checked_prefix(talk: Sequence[dict[str, Any]], service: Service) -> None:
    """Refuse a message that the answer should continue where the chat format cannot do that.

    Raises:
        InvalidRequestError: naming the message.
    """
    continues = service.llm.assembly.facts.architecture in GENERATIONS
    for index, message in enumerate(talk):
        if message.get("prefix") and not continues:
            raise InvalidRequestError(
                f"messages[{index}]: the chat format of this model cannot continue an answer.",
                setting=f"messages[{index}]",
                next_step="End with a message of the user.",
            )
