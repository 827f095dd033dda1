"""``/v1/recipes``: what there is, and one recipe on one text."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field

from deepinfer.plugins import PluginManager
from deepinfer.recipes.registry import listed, made
from deepinfer.recipes.running import MAX_REPAIRS, arun
from deepinfer.sampling_params import SamplingParams
from deepinfer.server.limits import queue_full
from deepinfer.server.schemas import Body, Temperature, Text

if TYPE_CHECKING:
    from deepinfer.server.service import Service

_AT_ONCE = 8
"""Pieces of one document in the engine at a time, so that a long one leaves room for others."""


class RecipeBody(Body):
    """``POST /v1/recipes``: a recipe, its options, a text; its value and steps come back."""

    recipe: Text
    text: Text
    options: dict[str, Any] = Field(default_factory=dict)
    max_repairs: int = Field(default=MAX_REPAIRS, ge=0, le=8)
    model: str | None = None
    temperature: Temperature = 0.0
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)


class Recipes:
    """The recipes that this server's plugins sell."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @cached_property
    def _manager(self) -> PluginManager:
        return PluginManager(disable=self._service.llm.assembly.config.disable_plugins)

    async def list(self) -> dict[str, Any]:
        """Names with a line about each."""
        found = await self._service.in_thread(lambda: listed(self._manager))
        return {"object": "list", "data": [{"id": n, "about": a} for n, a in found.items()]}

    async def run(self, body: dict[str, Any]) -> dict[str, Any]:
        """One text through one recipe. Leaving it frees everything.

        Raises:
            DeepInferError: what cannot be honoured, or failed.
        """
        wish, service = RecipeBody.read(body), self._service
        service.check_model(wish.model)
        recipe = await service.in_thread(lambda: made(self._manager, wish.recipe, wish.options))
        if service.llm.get_num_unfinished_requests() + _AT_ONCE > service.capacity:
            raise queue_full()
        params = service.bounded(
            SamplingParams(
                temperature=wish.temperature,
                top_p=wish.top_p,
                seed=wish.seed,
                max_tokens=wish.max_tokens,
            )
        )
        result = await arun(
            service.llm,
            recipe,
            wish.text,
            sampling_params=params,
            max_repairs=wish.max_repairs,
            at_once=_AT_ONCE,
        )
        return result.as_dict()
