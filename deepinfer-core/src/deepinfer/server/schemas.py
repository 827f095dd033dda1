"""Bodies of ``/v1/generate``, ``/v1/completions`` and ``/v1/chat/completions``, field by field.

Where you are: the first check of a body, and what the OpenAPI document is made of. A field that is
not written here is refused by its path. ``harmless`` names those that clients send and that change
no answer: they are accepted and listed in a warning header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer.errors import InvalidRequestError, shown

_NO_FIELD: Final = "extra_forbidden"
_TAGS: Final = ("str", "int", "float", "bool", "none", "list", "dict")
"""What pydantic calls the members of a union of plain types."""
Temperature = Annotated[float, Field(ge=0)]
Token = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class Part(BaseModel):
    """An object of a body: closed, and of the types that JSON says."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Body(Part):
    """A whole body."""

    harmless: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """The body, checked.

        Raises:
            InvalidRequestError: naming the path of the first field at fault, and all others.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as why:
            raise _explained(why, body) from None

    def said(self) -> dict[str, Any]:
        """The fields that were given and that mean something, as plain values."""
        given = self.model_dump(exclude_unset=True, exclude_none=True, by_alias=True)
        return {name: value for name, value in given.items() if name not in self.harmless}

    def ignored(self) -> tuple[str, ...]:
        """Those that were given and change nothing."""
        given = (n for n in self.harmless if n in self.model_fields_set)
        return tuple(n for n in given if getattr(self, n) is not None)


def path_of(loc: Sequence[int | str], body: Any) -> str:
    """Where an error lies, as ``messages[0].role``; without the tags of unions."""
    path = ""
    for part in _steps(tuple(loc), body) or ():
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _steps(loc: tuple[int | str, ...], value: Any) -> tuple[int | str, ...] | None:
    """The parts of ``loc`` that lead through ``value``; None if none do."""
    if not loc:
        return ()
    head, rest = loc[0], loc[1:]
    inside = isinstance(value, dict) and (head in value or (not rest and str(head).isidentifier()))
    if inside or (isinstance(value, list) and isinstance(head, int) and head < len(value)):
        known = not isinstance(value, dict) or head in value
        tail = _steps(rest, value[head] if known else None)
        if tail is not None:
            return (head, *tail)
    if isinstance(head, str) and rest:  # a tag
        return _steps(rest, value)
    return () if head in _TAGS or not str(head).isidentifier() or str(head)[0].isupper() else None


def _explained(error: ValidationError, body: Any) -> InvalidRequestError:
    items = [(path_of(item["loc"], body), item) for item in error.errors(include_url=False)]
    # A value that may have one of several types brings a line for each of them; where one of them
    # fails further inside, the others were not meant.
    inner = [path for path, _ in items]
    found = [pair for pair in items if not any(_inside(other, pair[0]) for other in inner)]
    text = "; ".join(dict.fromkeys(_line(path, item) for path, item in found[:8])).rstrip(".")
    return InvalidRequestError(f"{text}.", setting=found[0][0] or None)


def _inside(path: str, outer: str) -> bool:
    """Whether a path lies in what another names."""
    return bool(outer) and path != outer and path.startswith((f"{outer}.", f"{outer}["))


def _line(path: str, item: Any) -> str:
    if item["type"] == _NO_FIELD:
        return f"{path or item['loc'][-1]}: there is no such field"
    if item["type"] == "missing":
        return f"{path}: is missing"
    reason = item["msg"].removeprefix("Value error, ")
    return f"{path}={shown(item['input'])}: {reason}"


class Sampling(Body):
    """What every dialect of ours may say of sampling; names are those of ``SamplingParams``."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=4096)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Token] | None = None
    seed: int | None = None
    seq_seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]+$", max_length=18)], float] | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: list[Token] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    harmless: ClassVar[tuple[str, ...]] = ("user", "metadata")


class Structured(Part):
    """What the text must obey: one type and its rule. ``SamplingParams`` checks the rest."""

    model_config = ConfigDict(extra="allow")

    schema_type: Literal["json", "regex", "ebnf", "choice", "json_object", "structural_tag"]
    rule: Any = Field(default=None, alias="schema")


class GenerateBody(Sampling):
    """``POST /v1/generate``: the published call, and every sampling parameter beside it."""

    prompt: Text | list[Token]
    structured_output: Structured | None = None
    so_args: Structured | None = None
    logprobs: Annotated[int, Field(ge=-1)] | None = None


class StreamOptions(Part):
    """``include_usage``: a last piece says how many tokens there were."""

    include_usage: bool | None = None


class OpenAISampling(Sampling):
    """What both of OpenAI's older routes share."""

    stream_options: StreamOptions | None = None
    so_args: Structured | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    harmless: ClassVar[tuple[str, ...]] = (
        *Sampling.harmless,
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    )


class CompletionBody(OpenAISampling):
    """``POST /v1/completions``."""

    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TextPart(Part):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageUrl(Part):
    """An image as a data URL; the server fetches nothing and opens no file."""

    url: Annotated[str, Field(pattern=r"^[dD][aA][tT][aA]:")]
    detail: Literal["auto", "high", "original"] | None = None


class ImagePart(Part):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Function(Part):
    """A call as the model wrote it: ``arguments`` is JSON text."""

    name: str
    arguments: str


class Call(Part):
    """An entry of ``tool_calls``."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: Function


class ChatMessage(Part):
    """One message of any role; the model's chat format checks what belongs to which."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None
    # Answers of OpenAI's client hold these when they are sent back.
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionTool(Part):
    """What a tool is called and what it takes."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(Part):
    """Its name."""

    name: str


class ChosenTool(Part):
    """The one function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Part):
    """The schema that an answer must obey."""

    name: str
    description: str | None = None
    rule: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(Part):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Part):
    """JSON of a given shape."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class ChatBody(OpenAISampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    harmless: ClassVar[tuple[str, ...]] = (*OpenAISampling.harmless, "parallel_tool_calls")

    def ignored(self) -> tuple[str, ...]:
        return (*super().ignored(), *self._in_messages())

    def _in_messages(self) -> Iterator[str]:
        for index, message in enumerate(self.messages):
            for name in ("name", "annotations"):
                if getattr(message, name):
                    yield f"messages[{index}].{name}"
