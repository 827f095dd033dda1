"""Recipes by name, core's and plugins'."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deepinfer.discovery import import_path
from deepinfer.errors import InvalidRequestError, PluginError

if TYPE_CHECKING:
    from deepinfer.plugins import PluginManager
    from deepinfer.recipes.interface import Recipe


def listed(manager: PluginManager) -> dict[str, str]:
    """Name → one line about it."""
    return {o.spec.name: getattr(o.spec, "about", "") for o in manager.offers("recipe")}


def made(manager: PluginManager, name: str, options: Mapping[str, Any]) -> Recipe:
    """A recipe with its options.

    Raises:
        InvalidRequestError: there is no such recipe, or it refuses an option.
        PluginError: the plugin that sells it is broken.
    """
    offers = {offer.spec.name: offer for offer in manager.offers("recipe")}
    if name not in offers:
        near = "".join(f" Did you mean {n}?" for n in difflib.get_close_matches(name, offers, 1))
        raise InvalidRequestError(
            f"There is no recipe {name!r}.{near} There are {', '.join(offers)}.", setting="recipe"
        )
    offer = offers[name]
    answer = manager.available(offer)
    if answer.state != "usable":
        raise PluginError(f"The {offer} cannot be used: {answer.reason}.", setting="recipe")
    try:
        kind = import_path(offer.spec.load)
    except Exception as why:
        raise PluginError(f"The {offer} cannot be used: {why!r}.", setting="recipe") from why
    recipe: Recipe = kind(**options)
    return recipe
