"""Fields of a published draft's config.json that would change its mathematics."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deepinfer.errors import ConfigError, UnsupportedError
from deepinfer.models.fields import layer_kinds


def refuse(
    fields: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    known: Collection[str],
    prefixes: tuple[str, ...],
    also: Collection[str],
    next_step: str,
) -> None:
    """Raise UnsupportedError for all that is asked for and not built, at once, by name.

    That is a field with another value than those of ``neutral``, one that begins with one of the
    method's ``prefixes`` and is not ``known``, a layer that is not one of full attention, and what
    the method itself has found (``also``).
    """
    found = [
        f"{name}={fields[name]!r}"
        for name, fine in neutral.items()
        if name in fields and fields[name] not in fine
    ]
    found += also
    kinds = set(layer_kinds(fields) or ()) - {"full_attention"}
    found += [f"layer_types with {kind!r}" for kind in sorted(kinds)]
    fine = {*known, *neutral}
    found += sorted(name for name in fields if name.startswith(prefixes) and name not in fine)
    if found:
        raise UnsupportedError(
            f"The draft's config.json asks for {', '.join(found)}, which is not built.",
            setting=found[0].split("=")[0],
            next_step=next_step,
        )


def refuse_target(wrong: Collection[str]) -> None:
    """Raise ConfigError if anything is ``wrong`` between a draft and its target."""
    if wrong:
        raise ConfigError(
            f"The draft was not made for this target: {'; '.join(wrong)}.",
            setting="speculative",
            next_step="Name the draft that was trained for it.",
        )
