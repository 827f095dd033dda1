"""Conversations to prompt text.

Where you are: ``LLM.chat`` and the server render messages here, then encode the text without
further special tokens. A ``ChatFormat`` is anything that renders; ``TemplateFormat`` is the common
one, a Jinja template that came with the model, run in a sandbox because models are downloads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from deepinfer.errors import InvalidRequestError, TokenizerError

if TYPE_CHECKING:
    from deepinfer.tokenizer import Tokenizer

Message = Mapping[str, Any]
ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class ChatFormat(Protocol):
    """Renders a conversation to the text that the model was trained on."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, special tokens included.

        Args:
            messages: role and content each, oldest first.
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_kwargs: further variables, such as ``enable_thinking``.

        Raises:
            InvalidRequestError: a message is malformed, or the format refuses it.
        """
        ...


def chat_format(tokenizer: Tokenizer, template: str | None = None) -> ChatFormat:
    """The format of a model: the given template, else the one that came with the tokenizer.

    Raises:
        TokenizerError: there is no template, or it is not valid Jinja.
    """
    templates = {"default": template} if template is not None else tokenizer.chat_templates
    if not templates:
        raise TokenizerError(
            f"{tokenizer.name} came without a chat template (a base model, perhaps).",
            setting="chat_template",
            next_step="Use generate() with a text prompt, or pass a chat template.",
        )
    return TemplateFormat(templates, tokenizer.special_tokens, tokenizer.name)


class TemplateFormat:
    """A chat format made of Jinja templates by name.

    ``tool_use`` is taken for requests with tools where it exists, ``default`` otherwise.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], name: str
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._name = name
        environment = _environment()
        self._compiled = {key: _compile(environment, text, name) for key, text in templates.items()}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        variables = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": [_parsed_calls(m) for m in check_messages(messages)],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._template(bool(tools))
        try:
            return str(template.render(variables))
        except Exception as why:  # a template is a program, and it came with the model
            raise InvalidRequestError(
                f"The chat template of {self._name} refuses these messages: {why}.",
                setting="messages",
            ) from why

    def _template(self, with_tools: bool) -> Any:
        if with_tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        if "default" in self._compiled:
            return self._compiled["default"]
        raise TokenizerError(
            f"{self._name} has no default chat template, only {', '.join(self._compiled)}.",
            setting="chat_template",
            next_step="Pass a chat template.",
        )


def check_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages if they are well formed.

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
        _check_message(f"messages[{index}]", message)
    return messages


def _check_message(where: str, message: Any) -> None:
    def refuse(what: str, next_step: str | None = None) -> NoReturn:
        raise InvalidRequestError(f"{where} {what}.", setting=where, next_step=next_step)

    if not isinstance(message, Mapping):
        refuse(f"must be a mapping with role and content, not {type(message).__name__}")
    role = message.get("role")
    if role is None:
        refuse("has no role")
    if role not in ROLES:
        refuse(f"has the unknown role {role!r}; known are {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return
    if content is None:
        refuse("has no content")
    if not isinstance(content, str):
        refuse(
            f"has content of type {type(content).__name__}; it must be a str",
            "Join the text parts into one string.",
        )


def _parsed_calls(message: Message) -> dict[str, Any]:
    """A copy in which the arguments of tool calls are objects, as templates expect them."""
    copy = dict(message)
    calls = copy.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        copy["tool_calls"] = [_parsed_call(call) for call in calls]
    return copy


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError:
            pass  # the model wrote broken JSON; the template shows it as it is
    return {**call, "function": function}


def _environment() -> Any:
    """The sandbox that chat templates are written for: as transformers sets it up."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_block(), loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _generation_block() -> Any:
    """``{% generation %}`` marks the assistant's words for training; here it changes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlock


def _compile(environment: Any, text: str, name: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return environment.from_string(text)
    except TemplateSyntaxError as why:
        raise TokenizerError(
            f"The chat template of {name} is not valid: line {why.lineno}: {why.message}.",
            setting="chat_template",
        ) from why


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own filter, which escapes < > & for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
