"""From what a caller types to :class:`deepinfer.api.plan.Request` s, or an error that names it.

Where you are: the front door's first half. Prompts come as text, ids or dictionaries, alone or
mixed in a list; everything that needs the vocabulary or the context length is checked here, so
that the brain only ever sees requests that can run.
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, cast

from deepinfer.api.plan import Image, Request
from deepinfer.chat.json_answer import JSONAnswerParser
from deepinfer.engine.logits import to_row_params
from deepinfer.engine.request import check_images, in_vocabulary, mix
from deepinfer.entrypoints.images import PromptImages
from deepinfer.errors import InvalidRequestError, TokenizerError
from deepinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.api.executor import ModelFacts
    from deepinfer.api.grammar import GrammarBackend
    from deepinfer.chat import OutputParser


class TextPrompt(TypedDict):
    """``{"prompt": "…"}``, with its ids beside it if they are known already.

    ``multi_modal_data``: ``{"image": …}``, one image or a list: paths, bytes, data URLs or images
    of Pillow; the prompt spells the model's image token once for each.
    """

    prompt: str
    prompt_token_ids: NotRequired[Sequence[int]]
    multi_modal_data: NotRequired[Mapping[str, Any]]


class ChatPrompt(TextPrompt):
    """A rendered conversation; ``parser`` makes what takes an answer apart, where one can.

    ``reasoning_end``: the text that ends the reasoning with which the answer begins, if it does.
    ``images``: at their places in the ids. ``so_args``: what the answer must obey.
    """

    so_args: NotRequired[Mapping[str, Any] | None]
    parser: NotRequired[Callable[[], OutputParser] | None]
    reasoning_end: NotRequired[str]
    images: NotRequired[tuple[Image, ...]]


class TokensPrompt(TypedDict):
    """``{"prompt_token_ids": […]}``; ``multi_modal_data`` as beside a text."""

    prompt_token_ids: Sequence[int]
    multi_modal_data: NotRequired[Mapping[str, Any]]


_JSON = ("json", "json_object")
_DRAWN = 0xD1B54A32D192ED03
"""Keeps drawn seeds apart from the seeds of parallel samples, which come from ``mix`` too."""

Prompt = str | Sequence[int] | TextPrompt | ChatPrompt | TokensPrompt
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that may run: its text if it came as text, its ids, one request per sample.

    ``parser`` makes a parser of the answer for each sample of a conversation.
    """

    request_id: str
    prompt: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    requests: tuple[Request, ...]
    parser: Callable[[], OutputParser] | None = None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """All prompts; a flat list of ids is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or _unordered(prompts) or _is_id(prompts):
        raise _no_prompt(prompts)
    items = list(prompts)
    if items and all(_is_id(item) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def one_each(name: str, values: Any, single: type | tuple[type, ...], count: int) -> list[Any]:
    """One value for all prompts or a value for each; a wrong number is refused."""
    if values is None or isinstance(values, single):
        return [values] * count
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise InvalidRequestError(f"{name} cannot be {values!r}.", setting=name)
    each = list(values)
    if len(each) != count:
        raise InvalidRequestError(
            f"{name} has {len(each)} entries for {count} prompts.",
            setting=name,
            next_step="Give one for all, or one per prompt.",
        )
    return each


def _is_id(item: Any) -> bool:
    """An integer of any library; arrays have ``__index__`` too, and are none."""
    scalar = hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0
    return scalar and not isinstance(item, bool)


def _unordered(given: Any) -> bool:
    """Iterable, and surely not meant as ids."""
    return isinstance(given, bytes | bytearray | set | frozenset)


def _no_prompt(given: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"A prompt is a text, a list of token ids, {{'prompt': …}} or {{'prompt_token_ids': …}}, "
        f"not {type(given).__name__}.",
        setting="prompts",
    )


class Preparer:
    """Turns prompts into requests for one engine.

    Args:
        facts: the model's vocabulary and context.
        tokenizer: text to ids; None where only ids can be given.
        eos_ids: what ends a text unless ``ignore_eos``.
        seed: where seeds of requests without one come from; None is the system's entropy.
        clock: stamps arrivals; the engine's clock.
        images: prepares them; None for a model that takes none.
        grammar: checks what structured output is asked for; None refuses it.
    """

    def __init__(
        self,
        facts: ModelFacts,
        tokenizer: Any,
        eos_ids: frozenset[int],
        seed: int | None,
        clock: Callable[[], float] = time.monotonic,
        images: PromptImages | None = None,
        grammar: GrammarBackend | None = None,
    ) -> None:
        self.images = images or PromptImages(None, facts.architecture)
        self._facts = facts
        self._vocab = facts.vocab_size
        self._max_len = facts.max_model_len
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._seed = seed
        self._clock = clock
        self._drawn = itertools.count()
        self._grammar = grammar

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        stream: bool = True,
    ) -> Prepared:
        """Check one prompt and make its requests, ``id#i`` for sample i of several; ``stream``: as
        in :class:`~deepinfer.api.plan.Request`, unless ``output_kind`` is ``final_only``.

        Raises:
            InvalidRequestError: naming the field, what was given and the bound.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params is {type(params).__name__}, not SamplingParams.",
                setting="sampling_params",
            )
        rank = _rank(priority)
        parser, params = _for_answers(prompt, params)
        text, ids = self._ids(prompt)
        ids, images = self.images.of_prompt(prompt, ids)
        self._check_length(ids, images)
        in_vocabulary("prompt_token_ids", ids, self._vocab)
        check_images(ids, images, self._facts)
        arrival, seed = self._clock(), self._seed_of(params)
        limit = self._limit(len(ids), params)
        _not_drawn(params, self._facts.image_token)
        self._check_grammar(params)
        row = to_row_params(params, len(ids), self._eos_ids, self._vocab, self._encode)
        requests = tuple(
            Request(
                id=request_id if params.n == 1 else f"{request_id}#{i}",
                token_ids=ids,
                sampling=params,
                row_params=row,
                seed=mix(seed, i),
                limit=limit,
                eos_ids=self._eos_ids,
                priority=rank,
                arrival=arrival,
                structured=params.so_args,
                images=images,
                reasoning_end=self._reasoning_end(prompt, params),
                stream=stream and params.output_kind != "final_only",
            )
            for i in range(params.n)
        )
        return Prepared(request_id, text, ids, params, requests, parser)

    def _ids(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        text = shown(prompt)
        if isinstance(prompt, Mapping):
            prompt = _of_mapping(prompt)
        if isinstance(prompt, str):
            return prompt, tuple(self._encode_prompt(prompt))
        if not isinstance(prompt, Iterable) or _unordered(prompt) or _is_id(prompt):
            raise _no_prompt(prompt)
        ids: tuple[Any, ...] = tuple(prompt)
        if set(map(type, ids)) <= {int}:  # nearly always, and ten times as fast
            return text, ids
        for item in ids:
            if not _is_id(item):
                raise InvalidRequestError(
                    f"prompt_token_ids holds {item!r}, which is no token id.",
                    setting="prompt_token_ids",
                )
        return text, tuple(map(operator.index, ids))

    def _encode_prompt(self, text: str) -> Sequence[int]:
        if not text:
            raise _empty()
        if self._tokenizer is None:
            raise InvalidRequestError(
                "This engine has no tokenizer, so a prompt must be token ids.", setting="prompts"
            )
        try:
            ids: Sequence[int] = self._tokenizer.encode(text)
        except TokenizerError as why:  # a lone surrogate, say
            raise InvalidRequestError(why.message, setting="prompts") from why
        return ids

    def _encode(self, text: str) -> Sequence[int]:
        """For texts inside parameters (bad words): without the marks that begin a prompt."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                "This engine has no tokenizer, so bad_words cannot be used.", setting="bad_words"
            )
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _check_grammar(self, params: SamplingParams) -> None:
        if params.so_args is None:
            return
        if self._grammar is None:
            raise InvalidRequestError(
                "Structured output needs a grammar plugin, and this engine has none.",
                setting="so_args",
                next_step="pip install deepinfer-structured",
            )
        self._grammar.check(params.so_args)

    def _reasoning_end(self, prompt: Prompt, params: SamplingParams) -> tuple[int, ...]:
        """Ids behind which a grammar rules; none where it rules from the first token on."""
        mark = prompt.get("reasoning_end") if isinstance(prompt, Mapping) else None
        if not mark or params.so_args is None:
            return ()
        return tuple(self._tokenizer.encode(cast("str", mark), add_special_tokens=False))

    def _check_length(self, ids: Sequence[int], images: Sequence[Image]) -> None:
        if not ids:
            raise _empty()
        if len(ids) >= self._max_len:
            seen = sum(image.tokens for image in images)
            of_images = f", {seen} of them of {len(images)} images," if images else ""
            raise InvalidRequestError(
                f"The prompt has {len(ids)} tokens{of_images} and max_model_len is "
                f"{self._max_len}: there must be room for at least one more.",
                setting="max_model_len",
                next_step="Shorten the prompt, or raise max_model_len if the model allows it.",
            )

    def _limit(self, prompt_len: int, params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self._max_len
        return min(prompt_len + params.max_tokens, self._max_len)

    def _seed_of(self, params: SamplingParams) -> int:
        if params.effective_seed is not None:
            return params.effective_seed
        if self._seed is None:
            return int.from_bytes(os.urandom(8), "little")
        return mix(self._seed ^ _DRAWN, next(self._drawn))


def _for_answers(
    prompt: Prompt, params: SamplingParams
) -> tuple[Callable[[], OutputParser] | None, SamplingParams]:
    """What takes a conversation's answers apart, and parameters that leave it what it needs."""
    if not isinstance(prompt, Mapping):
        return None, params
    chat = cast("ChatPrompt", prompt)
    forced = chat.get("so_args")
    if forced is not None and params.so_args is not None:
        raise InvalidRequestError(
            "so_args and response_format both say what the answer must obey.",
            setting="response_format",
            next_step="Give one of them.",
        )
    if forced is not None:
        params = params.model_copy(update={"so_args": forced})
    parser = chat.get("parser")
    if parser is None or not params.detokenize:  # an answer is taken apart by its text
        return None, params
    if params.skip_special_tokens and "skip_special_tokens" in params.model_fields_set:
        raise InvalidRequestError(
            "skip_special_tokens=True would take out the marks between reasoning, answer and tool "
            "calls, which this model's answers are taken apart by.",
            setting="skip_special_tokens",
            next_step="Leave it out; output.message holds the parts without marks.",
        )
    if params.so_args is not None and params.so_args.schema_type in _JSON:
        parser = partial(JSONAnswerParser, chat.get("reasoning_end", ""))
    return parser, params.model_copy(update={"skip_special_tokens": False})


def _not_drawn(params: SamplingParams, image_token: int) -> None:
    """Refuse wishes for the id of images, which is never drawn."""
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        if image_token >= 0 and image_token in (getattr(params, name) or ()):
            raise InvalidRequestError(
                f"{name} names id {image_token}, which stands for an image in a prompt and is "
                "never sampled.",
                setting=name,
            )


def _rank(priority: Any) -> int:
    if priority is None:
        return 0
    if not _is_id(priority):
        raise InvalidRequestError(f"priority={priority!r} is no whole number.", setting="priority")
    return operator.index(priority)


def shown(prompt: Any) -> str | None:
    """The text of a prompt that has one."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _of_mapping(prompt: Mapping[str, Any]) -> Prompt:
    """Its ids if it has them, else its text."""
    for key in ("prompt_token_ids", "prompt"):
        if prompt.get(key) is not None:
            value: Prompt = prompt[key]
            return value
    raise InvalidRequestError(
        "A prompt's dictionary has 'prompt' or 'prompt_token_ids', "
        f"not {', '.join(map(repr, prompt)) or 'nothing'}.",
        setting="prompts",
    )


def _empty() -> InvalidRequestError:
    return InvalidRequestError(
        "The prompt is empty: there is nothing to continue.",
        setting="prompts",
        next_step="Give at least one token.",
    )
