"""The common chat format: a Jinja template that came with the model.

Where you are: one of the formats behind ``chat_format``. Templates run in a sandbox, because models
are downloads. A wish that no variable of the template stands for is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from deepinfer.chat.interface import NO_WISHES, ChatOptions, Message, RenderedChat
from deepinfer.chat.messages import check_messages
from deepinfer.errors import InvalidRequestError, TokenizerError

# Names for whether the model should think, in the templates of different families.
_THINKING: Final = ("enable_thinking", "thinking")
_OURS: Final = ("messages", "tools", "add_generation_prompt")


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
        self._reads = {key: _names_read(environment, text) for key, text in templates.items()}

    def render(self, messages: Sequence[Message], options: ChatOptions = NO_WISHES) -> RenderedChat:
        talk = [_parsed_calls(m) for m in check_messages(messages)]
        shown = options.tools if options.tools and options.tool_choice != "none" else None
        key = self._key(bool(shown))
        variables = {
            **self._special_tokens,
            "documents": None,
            **self._wishes(options, self._reads[key]),
            "messages": talk,
            "tools": [dict(tool) for tool in shown] if shown else None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            return RenderedChat(text=str(self._compiled[key].render(variables)))
        except Exception as why:  # a template is a program, and it came with the model
            raise InvalidRequestError(
                f"The chat template of {self._name} refuses these messages: {why}.",
                setting="messages",
            ) from why

    def _wishes(self, options: ChatOptions, reads: frozenset[str]) -> dict[str, Any]:
        """The template's variables for what the caller wishes; refused where it reads none."""
        found = dict(options.template_kwargs)
        for name in found:
            if name not in reads or name in _OURS:
                self._refuse(name)
        if options.tools and options.tool_choice != "none" and "tools" not in reads:
            self._refuse("tools")
        if options.thinking is not None:
            known = next((n for n in _THINKING if n in reads), None)
            _set(found, known or self._refuse("enable_thinking"), options.thinking)
        named = {
            "reasoning_effort": options.reasoning_effort,
            "response_format": options.response_format,
            "tool_choice": options.tool_choice,
        }
        for name, value in named.items():
            if name in reads and value is not None:
                _set(found, name, value)
            elif not _goes_without(name, value, options):
                self._refuse(name)
        return found

    def _refuse(self, name: str) -> NoReturn:
        hint = "SamplingParams(so_args=…) forces a format." if name == "response_format" else None
        raise InvalidRequestError(
            f"The chat template of {self._name} does not know {name}.",
            setting=name,
            next_step=hint,
        )

    def _key(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._compiled:
            return "tool_use"
        if "default" in self._compiled:
            return "default"
        raise TokenizerError(
            f"{self._name} has no default chat template, only {', '.join(self._compiled)}.",
            setting="chat_template",
            next_step="Pass a chat template.",
        )


def _goes_without(name: str, value: Any, options: ChatOptions) -> bool:
    """Whether a wish is met by a template that does not know it."""
    if name == "tool_choice":
        return value in (None, "auto", "none")
    if name == "response_format":
        return value in (None, {"type": "text"}) or options.format_is_forced
    return value is None


def _set(found: dict[str, Any], name: str, value: Any) -> None:
    if found.setdefault(name, value) != value:
        raise InvalidRequestError(
            f"{name} is given twice, as {found[name]!r} and {value!r}.", setting=name
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


def _names_read(environment: Any, text: str) -> frozenset[str]:
    """The variables that a template looks at, wherever they come from."""
    from jinja2 import nodes

    names = environment.parse(text).find_all(nodes.Name)
    return frozenset(node.name for node in names if node.ctx == "load")


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
