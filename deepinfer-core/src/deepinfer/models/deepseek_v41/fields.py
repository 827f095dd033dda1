"""One object of a config.json, whose fields are taken by name; what nobody took is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from deepinfer.errors import ModelLoadError, UnsupportedError, shown


class Fields:
    """A JSON object that remembers which of its fields were read.

    Args:
        raw: the object.
        where: what messages call it.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where
        self._taken: set[str] = set()

    def maybe(self, name: str) -> Any:
        """A field, None if it is absent."""
        self._taken.add(name)
        return self._raw.get(name)

    def leave(self, *names: str) -> None:
        """Fields that mean nothing here."""
        self._taken.update(names)

    def value(self, name: str) -> Any:
        """A number that has to be there."""
        found = self.maybe(name)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self._wrong(name, found, "a number is needed")
        return found

    def size(self, name: str) -> int:
        """A positive whole number."""
        found = self.maybe(name)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise self._wrong(name, found, "a positive number is needed")
        return found

    def index(self, name: str, count: int) -> int:
        """A whole number below ``count``, from 0 on: an id, a layer."""
        found = self.value(name)
        if not isinstance(found, int) or not 0 <= found < count:
            raise self._wrong(name, found, f"a whole number from 0 to {count - 1} is needed")
        return found

    def real(self, name: str) -> float:
        """A number above 0 that float64 has."""
        found = self.value(name)
        if not 0 < found <= sys.float_info.max:
            raise self._wrong(name, found, "a number above 0 is needed")
        return float(found)

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers from 0 on."""
        found = self.maybe(name)
        if not isinstance(found, list) or any(type(n) is not int or n < 0 for n in found):
            raise self._wrong(name, found, "a list of numbers is needed")
        return tuple(found)

    def section(self, name: str) -> Mapping[str, Any]:
        """An object inside this one."""
        found = self.maybe(name)
        if not isinstance(found, Mapping):
            raise self._wrong(name, found, "an object is needed")
        return found

    def only(self, built: Mapping[str, Any]) -> None:
        """Fields of which one value is built."""
        wrong = [f"{n}={v!r}" for n, want in built.items() if (v := self.maybe(n)) != want]
        if wrong:
            name = wrong[0].split("=")[0]
            raise UnsupportedError(
                f"The model's {self._where} has {', '.join(wrong)}, which is not built.",
                setting=name,
                next_step=f"{name}={built[name]!r} is.",
            )

    def refuse_rest(self, harmless: frozenset[str]) -> None:
        """Refuse fields that were not read: they may change every logit."""
        left = sorted(set(self._raw) - self._taken - harmless)
        if left:
            raise UnsupportedError(
                f"The model's {self._where} has {', '.join(left)}, which this version does not "
                "know.",
                setting=left[0],
            )

    def _wrong(self, name: str, found: Any, need: str) -> ModelLoadError:
        return ModelLoadError(
            f"The model's config.json has {self._where}.{name}={shown(found)}; {need}.",
            setting=name,
        )
