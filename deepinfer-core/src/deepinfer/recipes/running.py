"""Recipes on a model: :func:`run` for an ``LLM``, :func:`arun` for an ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from deepinfer.errors import InvalidRequestError
from deepinfer.recipes.session import Session
from deepinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.entrypoints.async_llm import AsyncLLM
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.recipes.interface import Ask, Recipe, RecipeResult

MAX_REPAIRS = 2
"""How often a question is asked again where the caller does not say."""


def run(
    llm: LLM,
    recipe: Recipe,
    texts: Iterable[str],
    *,
    sampling_params: SamplingParams | None = None,
    max_repairs: int = MAX_REPAIRS,
) -> list[RecipeResult]:
    """Work on all texts at once; a result for each, in order.

    Args:
        llm: the model; its engine needs a grammar plugin.
        recipe: the job with its options.
        texts: one or more documents (or questions, as the recipe says).
        sampling_params: how to sample; greedy and up to the context's end if None. Its ``so_args``
            are the recipe's business and may not be given.
        max_repairs: how often one question may be asked again.

    Raises:
        InvalidRequestError: a text or an option cannot be honoured.
        DeepInferError: a question could not be run.
    """
    base = _sampling(sampling_params)
    given = [texts] if isinstance(texts, str) else list(texts)
    sessions = [Session(recipe, text, max_repairs) for text in given]
    while waiting := [(s, part) for s in sessions for part in s.open_parts()]:
        talks = [part.messages for _, part in waiting]
        outputs = llm.chat(talks, [_params(base, part.ask) for _, part in waiting])
        for (session, part), output in zip(waiting, outputs, strict=True):
            if output.error is not None:
                raise output.error
            session.answer(part, *_said(output))
    return [session.result() for session in sessions]


async def arun(
    llm: AsyncLLM,
    recipe: Recipe,
    text: str,
    *,
    sampling_params: SamplingParams | None = None,
    max_repairs: int = MAX_REPAIRS,
    at_once: int | None = None,
) -> RecipeResult:
    """The same for one text on an event loop; see :func:`run`.

    ``at_once``: questions in the engine at a time; None is all.
    """
    base = _sampling(sampling_params).model_copy(update={"output_kind": "final_only"})
    session = await asyncio.to_thread(Session, recipe, text, max_repairs)
    while waiting := session.open_parts()[:at_once]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_ask(llm, part.messages, _params(base, part.ask)))
                    for part in waiting
                ]
        except ExceptionGroup as failures:  # the first has ended the others
            raise failures.exceptions[0] from None
        for part, task in zip(waiting, tasks, strict=True):
            session.answer(part, *task.result())
    return session.result()


async def _ask(llm: AsyncLLM, messages: Any, params: SamplingParams) -> tuple[str, str | None]:
    (last,) = [output async for output in llm.chat(messages, params)]  # "final_only": one
    return _said(last)


def _sampling(given: SamplingParams | None) -> SamplingParams:
    base = given or SamplingParams(temperature=0.0, max_tokens=None)
    for name, plain in (("so_args", None), ("n", 1)):
        if getattr(base, name) != plain:
            raise InvalidRequestError(
                f"sampling_params sets {name}, which is the recipe's to set.", setting=name
            )
    return base


def _params(base: SamplingParams, ask: Ask) -> SamplingParams:
    return base.model_copy(update={"so_args": dict(ask.so_args)})


def _said(output: Any) -> tuple[str, str | None]:
    (said,) = output.outputs
    text = said.text if said.message is None else said.message.content or ""
    return text, said.finish_reason
