"""What a chat format is: a conversation and its options in, a prompt and a parser out.

Where you are: the types that cross this room's border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from deepinfer.errors import InvalidRequestError, shown

Message = Mapping[str, Any]
ToolChoice = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a caller wishes beside the messages; None leaves it to the format.

    A format honours each wish or refuses it by name.

    Args:
        tools: JSON descriptions of the functions that the model may call.
        tool_choice: ``auto``, ``none``, ``required`` or ``{"type": "function", "function":
            {"name": …}}``.
        response_format: ``{"type": "text" | "json_object" | "json_schema", …}``. A chat format
            shows it to the model; a grammar forces it.
        format_is_forced: the caller has put ``response_format`` into ``so_args`` himself. A chat
            format that has no place for it may leave it out.
        reasoning_effort: how long the model should think, in the format's own words.
        thinking: whether it should think at all.
        add_generation_prompt: end with the opening of the assistant's turn.
        template_kwargs: further variables by the format's own names.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    response_format: Mapping[str, Any] | None = None
    format_is_forced: bool = False
    reasoning_effort: str | None = None
    thinking: bool | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.template_kwargs, Mapping):
            raise _no("chat_template_kwargs", self.template_kwargs, "a mapping")
        tools = self.tools
        if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
            raise _no("tools", tools, "a list of functions")
        for index, tool in enumerate(tools or ()):
            if not isinstance(tool, Mapping):
                raise _no(f"tools[{index}]", tool, "a mapping")


def _no(setting: str, given: Any, need: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{setting} must be {need}, not {type(given).__name__}.", setting=setting
    )


NO_WISHES: Final = ChatOptions()


@dataclass(frozen=True, slots=True)
class ChatImage:
    """An image of a conversation as the caller gave it: ``data`` or a ``path``.

    ``where`` names its part of the messages, for errors.
    """

    where: str
    data: bytes | None = None
    path: Path | None = None

    def read(self) -> bytes:
        """The encoded picture.

        Raises:
            InvalidRequestError: the path names no file that can be read.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None, "an image is data or a path"
        try:
            return self.path.read_bytes()
        except (OSError, ValueError) as why:  # ValueError: a path that no file system holds
            reason = (isinstance(why, OSError) and why.strerror) or why  # without the path
            raise InvalidRequestError(
                f"{self.where} names an image that cannot be read: {shown(str(self.path))}: "
                f"{reason}.",
                setting=self.where,
            ) from why


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called.

    ``arguments`` is JSON text as the model wrote it, possibly broken or cut short. ``id`` is drawn
    anew each time, so it takes no part in comparisons.
    """

    index: int
    name: str
    arguments: str
    id: str = field(default="", compare=False)

    def as_dict(self) -> dict[str, Any]:
        """As an entry of an assistant message's ``tool_calls``."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """An answer taken apart: what was thought, what was said, what is to be called."""

    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As a message to put back into the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """What a parser just learnt: more of the reasoning, of the content, or of one call.

    Of a call, the first piece has its ``id`` and ``name``; ``text`` continues its arguments.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    call: int = 0
    id: str = ""
    name: str = ""


class MessageBuilder:
    """Adds pieces up."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, list[ChatPiece]] = {}

    def add(self, pieces: Iterable[ChatPiece]) -> None:
        """Take the next pieces."""
        for piece in pieces:
            if piece.kind == "reasoning":
                self._reasoning.append(piece.text)
            elif piece.kind == "content":
                self._content.append(piece.text)
            else:
                self._calls.setdefault(piece.call, []).append(piece)

    def message(self) -> ChatMessage:
        """All of them so far; a part of which nothing came is None."""
        calls = (
            ToolCall(
                index,
                "".join(piece.name for piece in pieces),
                "".join(piece.text for piece in pieces),
                "".join(piece.id for piece in pieces),
            )
            for index, pieces in self._calls.items()
        )
        return ChatMessage(
            "".join(self._reasoning) if self._reasoning else None,
            "".join(self._content) if self._content else None,
            tuple(calls),
        )


class OutputParser(Protocol):
    """Takes one answer apart while it is written. How its text is cut may not show."""

    @property
    def finish_reason(self) -> str | None:
        """After ``finish``: what to say in place of its reason (``tool_calls``), or None."""
        ...

    def feed(self, text: str) -> list[ChatPiece]:
        """Take more of the answer, special tokens spelled out; give what is certain now."""
        ...

    def finish(self, reason: str) -> list[ChatPiece]:
        """The answer ended (``stop``, ``length`` …); give what was held back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as text, and how to read the answer.

    Args:
        text: the prompt, special tokens spelled out.
        special_ranges: ``[start, end)`` of ``text``, ascending, one special token each; all other
            text is encoded without the added vocabulary. None: special tokens are recognised
            wherever they are spelled.
        images: in the order of their placeholders.
        image_token: how a placeholder is spelled, if there can be one.
        parser: makes a parser for one answer, where the format has one.
        reasoning_end: what ends the reasoning that the answer begins with, as text: a grammar of
            the answer begins behind it. Empty: there is no reasoning first.
    """

    text: str
    special_ranges: Sequence[tuple[int, int]] | None = None
    images: tuple[ChatImage, ...] = ()
    image_token: str | None = None
    parser: Callable[[], OutputParser] | None = None
    reasoning_end: str = ""


class ChatFormat(Protocol):
    """Renders a conversation to what the model was trained on."""

    def render(self, messages: Sequence[Message], options: ChatOptions = NO_WISHES) -> RenderedChat:
        """The prompt.

        Args:
            messages: role and content each, oldest first.
            options: each is honoured or refused by name.

        Raises:
            InvalidRequestError: a message or an option is malformed, or the format refuses it.
        """
        ...
