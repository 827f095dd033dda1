"""Drafts that come with this package, by name: ``dspark-demo`` is for the demo model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.errors import ConfigError

from deepinfer_speculative.dspark.drafter import DSparkDrafter

if TYPE_CHECKING:
    from deepinfer.api.speculative import DrafterContext, DrafterTarget, DraftNeeds

FOLDER: Final = Path(__file__).parents[1] / "models"


class ShippedDrafter(DSparkDrafter):
    """A :class:`DSparkDrafter` whose checkpoint is ``models/NAME`` of this package, where NAME is
    the method's name.
    """

    def __init__(self, context: DrafterContext, target: DrafterTarget) -> None:
        super().__init__(_found(context), target)

    @classmethod
    def needs(cls, context: DrafterContext) -> DraftNeeds:
        """Those of the checkpoint."""
        return super().needs(_found(context))


def _found(context: DrafterContext) -> DrafterContext:
    """The same with the folder as its model.

    Raises:
        ConfigError: this build has no such draft, or the user names a checkpoint beside it.
    """
    name = context.method
    if context.model not in (None, name):
        raise ConfigError(
            f"speculative: {name!r} is a draft of its own; it takes no model "
            f"(model={context.model!r}).",
            setting="speculative",
            next_step="Leave model out, or name method 'dspark'.",
        )
    folder = FOLDER / name
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"speculative: the draft {name!r} is not part of this build of deepinfer-speculative.",
            setting="speculative",
            next_step="Name the folder of a draft: docs/speculative.md says how to train one.",
        )
    return replace(context, model=str(folder))
