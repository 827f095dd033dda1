"""Bodies of ``/v1/messages`` and ``/v1/responses``, field by field; see ``schemas``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from deepinfer.server.schemas import Body, JsonSchema, Part, Temperature, Text


class _Block(Part):
    """``cache_control`` changes no answer: equal prefixes are reused anyway."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ImageSource(Part):
    """The picture itself; the server fetches nothing."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(_Block):
    """A picture."""

    type: Literal["image"]
    source: ImageSource


class ToolUseBlock(_Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """What a call brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = (
        None
    )
    is_error: bool | None = None


class ThinkingBlock(Part):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserMessage(Part):
    """What the user or a tool said."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]


class AssistantMessage(Part):
    """What the model said; the last message is one that it continues."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(min_length=1)]


AnyMessage = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


class ClaudeTool(_Block):
    """A function."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]


class ClaudeChoice(Part):
    """Whether a call is wanted."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ClaudeChosen(Part):
    """Which call is wanted."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Whether the model thinks first. The budget bounds nothing: ``max_tokens`` does."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class MessagesBody(Body):
    """``POST /v1/messages``."""

    model: str | None = None
    messages: Annotated[list[AnyMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    system: str | list[TextBlock] | None = None
    stop_sequences: list[Text] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    tools: list[ClaudeTool] | None = None
    tool_choice: Annotated[ClaudeChoice | ClaudeChosen, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    harmless: ClassVar[tuple[str, ...]] = ("metadata", "service_tier")

    def ignored(self) -> tuple[str, ...]:
        return (*super().ignored(), *self._inside())

    def _inside(self) -> Iterator[str]:
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            yield "thinking.budget_tokens"
        if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use is not None:
            yield "tool_choice.disable_parallel_tool_use"
        for index, message in enumerate(self.messages):
            for at, block in enumerate(
                message.content if isinstance(message.content, list) else ()
            ):
                if getattr(block, "is_error", None) is not None:
                    yield f"messages[{index}].content[{at}].is_error"


class CountTokensBody(Body):
    """``POST /v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[AnyMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ClaudeTool] | None = None
    tool_choice: Annotated[ClaudeChoice | ClaudeChosen, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None


# The Responses API.


class InputText(Part):
    """Text of a user, or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Part):
    """A picture as a data URL."""

    type: Literal["input_image"]
    image_url: Annotated[str, Field(pattern=r"^[dD][aA][tT][aA]:")]
    detail: Literal["auto", "high", "original"] | None = None


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]


class MessageItem(Part):
    """A message; of an earlier answer it has an id and a status."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Part):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(Part):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: str | None = None


class ReasoningText(Part):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Part):
    """What the model thought in an earlier turn; its text, for nothing is stored here."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> Any:
    """Messages may come without a type."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FlatTool(Part):
    """A function, as this route writes them."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChosen(Part):
    """Which call is wanted."""

    type: Literal["function"]
    name: str


class FlatPlain(Part):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class FlatSchema(JsonSchema):
    """JSON of a given shape."""

    type: Literal["json_schema"]


class TextOptions(Part):
    """What the text must be."""

    format: Annotated[FlatPlain | FlatSchema, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class Reasoning(Part):
    """How long to think."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Body):
    """``POST /v1/responses``. Nothing is stored, so every request brings its whole conversation."""

    model: str | None = None
    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | FlatChosen | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    store: bool | None = None
    include: list[str] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    harmless: ClassVar[tuple[str, ...]] = (
        "store", "include", "parallel_tool_calls", "metadata", "user", "service_tier",
        "safety_identifier", "prompt_cache_key",
    )  # fmt: skip

    def ignored(self) -> tuple[str, ...]:
        found = [*super().ignored()]
        if self.text is not None and self.text.verbosity is not None:
            found.append("text.verbosity")
        if self.reasoning is not None and self.reasoning.summary is not None:
            found.append("reasoning.summary")
        return tuple(found)
