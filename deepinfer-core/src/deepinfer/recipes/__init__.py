"""Recipes: a prompt, a grammar, a check and a bounded repair loop, for jobs that people have.

``Classification``, ``NamedEntities``, ``SQLGeneration`` and ``Transformation`` are options and
questions; :func:`run` and :func:`arun` ask a model. They need a grammar plugin, so every answer has
the promised shape; the check then looks at what no grammar can know. A plugin adds recipes with
:class:`deepinfer.api.RecipeSpec`.

>>> from deepinfer import LLM
>>> from deepinfer.recipes import NamedEntities, run
>>> with LLM("demo") as llm:
...     (found,) = run(llm, NamedEntities(), ["Ada Lovelace wrote to Babbage from London."])
"""

from __future__ import annotations

from deepinfer.recipes.classify import Classification
from deepinfer.recipes.entities import NamedEntities
from deepinfer.recipes.interface import Ask, Recipe, RecipeResult, Step
from deepinfer.recipes.running import arun, run
from deepinfer.recipes.sql import SQLGeneration
from deepinfer.recipes.transform import Transformation

__all__ = [
    "Ask",
    "Classification",
    "NamedEntities",
    "Recipe",
    "RecipeResult",
    "SQLGeneration",
    "Step",
    "Transformation",
    "arun",
    "run",
]
