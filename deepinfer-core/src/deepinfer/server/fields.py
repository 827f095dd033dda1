"""From the library's names for what is wrong to the path that the client wrote.

Where you are: behind every refusal of a request that was read. The library speaks of ``so_args``
and ``max_model_len``; a client sent ``response_format`` and ``messages``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# The library's name: what a client may have written, the first that stands in the body.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "prompts": ("prompt", "messages", "input"),
    "prompt_token_ids": ("prompt", "messages", "input"),
    "max_model_len": ("prompt", "messages", "input"),
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    "stop": ("stop", "stop_sequences"),
    "reasoning_effort": ("reasoning_effort", "reasoning"),
    "enable_thinking": ("thinking",),
}
_INSIDE: Final = {"reasoning": "reasoning.effort", "thinking": "thinking.type"}
# Where a rule of structured output may stand, and where its schema lies in it.
_RULES: Final = (
    ("structured_output", "schema"),
    ("so_args", "schema"),
    ("structured_outputs", "json"),
    ("response_format", "json_schema.schema"),
)


def client_path(setting: str | None, body: Mapping[str, Any]) -> str | None:
    """The path in ``body`` that a library's ``setting`` means.

    Pointers (``/properties/a``) lie in the schema; ``messages[i]`` counts messages as the chat
    format saw them, which are the client's where nothing was put before or between them.
    """
    if setting is None:
        return None
    if "recipe" in body:
        return _of_recipe(setting, body)
    if setting.startswith("/"):
        return _rule(body, ".schema") + ("" if setting == "/" else setting)
    if setting == "so_args" or setting.startswith("so_args."):
        return _rule(body, setting.removeprefix("so_args"))
    if setting.startswith("messages["):
        return _message(setting, body)
    for name in _NAMES.get(setting, ()):
        if name in body:
            return _INSIDE.get(name, name)
    return setting


def _of_recipe(setting: str, body: Mapping[str, Any]) -> str:
    """A recipe asks in its own words: what its client wrote are options and a text."""
    given = body.get("options")
    options = given if isinstance(given, Mapping) else {}
    if setting.startswith("/"):  # in the schema that one of the options is
        names = [f".{name}" for name in ("target", "fields") if name in options]
        return f"options{''.join(names[:1])}" + ("" if setting == "/" else setting)
    if setting == body["recipe"]:
        return "options"
    if setting in ("prompt", "prompts", "prompt_token_ids", "max_model_len"):
        return "text"
    if setting.startswith("so_args"):
        return "recipe"
    option = setting.partition(".")[0]
    return f"options.{setting}" if option in options and option not in body else setting


def _rule(body: Mapping[str, Any], rest: str) -> str:
    text = body.get("text")
    if isinstance(text, Mapping) and text.get("format"):
        return f"text.format{rest}"
    for name, schema in _RULES:
        if body.get(name) is not None:
            return f"{name}.{schema}" if rest == ".schema" else f"{name}{rest}"
    return f"so_args{rest}"


def _message(setting: str, body: Mapping[str, Any]) -> str:
    if "input" in body:
        return "input"
    talk = body.get("messages")
    split = body.get("system") or (isinstance(talk, list) and any(map(_has_results, talk)))
    return "messages" if split else setting


def _has_results(message: Any) -> bool:
    """Whether a message of Anthropic's becomes several."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else ()
    return any(isinstance(p, Mapping) and p.get("type") == "tool_result" for p in parts)
