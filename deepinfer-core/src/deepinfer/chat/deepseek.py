"""DeepSeek-V4 and V4.1: their prompts, through DeepSeek's own package ``deepseek-recipe``.

Where you are: a chat format for checkpoints that come with code in place of a template. The recipe
renders and parses; here is what it leaves open: fields that it would pass over are refused, images
are kept aside under stand-in addresses, the answer's opening is left out or replaced on request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn

from deepinfer.chat.deepseek_parser import DeepseekParser
from deepinfer.chat.deepseek_request import (
    ROLES,
    check_parts,
    checked_options,
    request_messages,
    stand_in,
)
from deepinfer.chat.interface import NO_WISHES, ChatImage, ChatOptions, Message, RenderedChat
from deepinfer.chat.messages import check_messages
from deepinfer.errors import InvalidRequestError, TokenizerError


@dataclass(frozen=True, slots=True)
class Generation:
    """One of the two prompt layouts: the recipe's names, and how an image is spelled."""

    encoding: str
    model: str
    image_token: str | None = None


GENERATIONS: Final = {
    "DeepseekV4ForCausalLM": Generation("DeepseekV4Encoding", "DeepSeek-V4-Pro"),
    "DeepseekV41ForCausalLM": Generation(
        "DeepseekV41Encoding", "DeepSeek-V4.1-Flash", "<｜deepseek_image｜>"
    ),
}

_ASSISTANT: Final = "<｜Assistant｜>"
_THINK: Final = ("<think>", "</think>")
# What the recipe raises for bodies that are no JSON, too deep or out of range.
_REFUSALS: Final = (ValueError, TypeError, OverflowError, RecursionError)


class DeepseekFormat:
    """The format of one generation.

    Args:
        generation: V4 or V4.1.
        name: the model's, for errors.

    Raises:
        TokenizerError: the package is not installed.
    """

    def __init__(self, generation: Generation, name: str) -> None:
        self._generation = generation
        self._name = name
        self._recipe = _recipe()
        image = generation.image_token
        spelled = self._recipe.SpecialTokens(**({} if image is None else {"image": image}))
        self._conversion = self._recipe.ConversionOptions().with_special_tokens(spelled)
        self._encoding = getattr(self._recipe, generation.encoding)().with_special_tokens(spelled)

    def render(self, messages: Sequence[Message], options: ChatOptions = NO_WISHES) -> RenderedChat:
        asked = checked_options(options, self._name)
        check_messages(messages, ROLES, check_parts)
        talk, images = request_messages(messages, self._generation.image_token)
        body = {"model": self._generation.model, "messages": talk, **asked.body}
        request, rendered = self._through_the_recipe(body)
        begins = request.parsing_options.thinking_initial_stage
        chat = RenderedChat(
            text=rendered.prompt,
            special_ranges=rendered.special_ranges,
            images=_in_order(rendered.image_sources, images),
            image_token=self._generation.image_token,
            parser=partial(DeepseekParser, self._recipe, request),
            reasoning_end=_THINK[1] if begins is not None and begins.starts_in_reasoning() else "",
        )
        if asked.task is not None or not options.add_generation_prompt:
            opened = request.parsing_options.starts_in_tool_calls
            return _without_answer(chat, asked.task, opened)
        return chat

    def _through_the_recipe(self, body: Mapping[str, Any]) -> tuple[Any, Any]:
        """The converted request, and its prompt."""
        recipe = self._recipe
        try:
            request = recipe.ChatCompletionRequest(body).convert(self._conversion)
            return request, self._encoding.render_conversation(request.conversation)
        except (*_REFUSALS, recipe.ConversionError) as why:
            raise InvalidRequestError(
                f"The chat format of {self._name} refuses this conversation: {why}.",
                setting="messages",
            ) from why


def _recipe() -> Any:
    """DeepSeek's package, imported on first use."""
    try:
        import deepseek_recipe
    except ImportError as why:
        raise TokenizerError(
            "Conversations with this model need the package 'deepseek-recipe', which is not "
            "installed.",
            setting="chat_template",
            next_step="pip install 'deepinfer-core[deepseek]', or pass a chat template.",
        ) from why
    return deepseek_recipe


def _in_order(sources: Sequence[Any], images: Sequence[ChatImage]) -> tuple[ChatImage, ...]:
    """The images as their placeholders stand: results of tools move to the order of the calls."""
    by_address = {stand_in(index): image for index, image in enumerate(images)}
    return tuple(by_address[source.data_url] for source in sources)


def _without_answer(chat: RenderedChat, task: str | None, opened: bool) -> RenderedChat:
    """The prompt without the answer's opening, or with an internal task's token in its place.

    The token of ``action`` follows the opening; those of the other tasks replace it
    (specification 10.2, item 10).
    """
    ranges = list(chat.special_ranges or ())
    tail = [chat.text[start:end] for start, end in ranges[-2:]]
    closed = bool(ranges) and ranges[-1][1] == len(chat.text)
    if opened or not closed or tail[0] != _ASSISTANT or tail[-1] not in _THINK:
        _no_opening("task" if task is not None else "add_generation_prompt")
    text = chat.text
    if task != "action":
        text = text[: ranges[-2][0]]
        ranges = ranges[:-2]
    if task is not None:
        token = f"<｜{task}｜>"
        ranges.append((len(text), len(text) + len(token)))
        text += token
    return replace(chat, text=text, special_ranges=ranges, parser=None, reasoning_end="")


def _no_opening(setting: str) -> NoReturn:
    raise InvalidRequestError(
        f"{setting} cannot be combined with a continued answer or a forced tool call: the prompt "
        "already holds the beginning of the answer.",
        setting=setting,
    )
