"""Options of a method, checked by name: :func:`take`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from deepinfer.errors import ConfigError

_T = TypeVar("_T", int, float, str)


def take(
    options: Mapping[str, Any],
    name: str,
    kind: type[_T],
    usual: _T,
    least: float | None = None,
    among: tuple[str, ...] = (),
) -> _T:
    """``options[name]`` as an int, float or str, or ``usual``.

    Raises:
        ConfigError: it is of another type, below ``least`` or none of ``among``.
    """
    if name not in options:
        return usual
    value = options[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    expected = " or ".join(map(repr, among)) or {int: "a whole number", float: "a number"}.get(
        kind, "a text"
    )
    bound = "" if least is None else f", {least:g} or more"
    wrong = not isinstance(value, kind) or isinstance(value, bool)
    if not wrong and least is not None and not isinstance(value, str):
        wrong = not least <= value < float("inf")
    if wrong or (among and value not in among):
        raise ConfigError(
            f"speculative: {name}={value!r}: expected {expected}{bound}.", setting="speculative"
        )
    return value  # type: ignore[no-any-return]
