"""The subschemas that a compilation has met, by number, and what they say for each type."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from deepinfer_structured.schema.errors import Unsupported, UnsupportedSchemaError
from deepinfer_structured.schema.formula import FALSE, SCALARS, TRUE, YES, Formula, Is, Or
from deepinfer_structured.schema.keywords import Reader, constant, kind_of
from deepinfer_structured.schema.limits import SchemaOptions, limit
from deepinfer_structured.schema.resolve import Place, Schemas


class Again(Exception):
    """Whether a member can exist depends on what is being worked out."""


class Nodes:
    """Subschemas by number.

    A number stands for a subschema at a place and the dynamic scope it was reached in, for a
    constant, or for a choice of literals.

    Args:
        loose: what was asked to be weakened so far, in order.
    """

    def __init__(self, schemas: Schemas, options: SchemaOptions) -> None:
        self.schemas, self.options = schemas, options
        self.loose: dict[Unsupported, None] = {}
        self.false: list[Place] = []
        self.open: dict[Any, None] = {}
        self.memo: dict[Any, Any] = {}
        self._nodes: list[Any] = [None, True]
        self._numbers: dict[Any, int] = {}

    def node(self, place: Place, scope: tuple[str, ...] = ()) -> int:
        """The number of a subschema, reached from these resources."""
        if place.schema is True or place.schema == {}:
            return TRUE
        if place.schema is False:
            self.false.append(place)
            return FALSE
        if self.schemas.uses_dynamic and place.base not in scope:
            scope = (*scope, place.base)
        return self._number((place, scope), ("schema", place, scope))

    def constant(self, value: Any, place: Place) -> int:
        """The number of "equals this value"; the place is for errors."""
        key = json.dumps(value, sort_keys=True)
        return self._number(("constant", key), ("constant", value, place))

    def either(self, literals: Iterable[int]) -> int:
        """The number of "at least one of these"."""
        parts = tuple(sorted({literal for literal in literals if literal != FALSE}))
        if len(parts) < 2:
            return parts[0] if parts else FALSE
        return TRUE if TRUE in parts else self._number(("either", parts), ("either", parts, None))

    def _number(self, key: Any, node: Any) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._nodes)
            self._nodes.append(node)
            if len(self._nodes) > self.options.max_nodes:
                raise limit(f"comes to over {self.options.max_nodes} subschemas", "a smaller one")
        return self._numbers[key]

    def place(self, literal: int) -> Place:
        """Where a literal comes from."""
        node = self._nodes[abs(literal)]
        if isinstance(node, tuple) and node[0] == "either":
            return self.place(node[1][0])
        found = next((x for x in node if isinstance(x, Place)), None) if node is not True else None
        return found or self.schemas.root

    def formula(self, number: int, kind: str) -> Formula:
        """What a subschema says about values of a type."""
        key = ("formula", number, kind)
        if key not in self.memo:
            self.memo[key] = self._read(number, kind)
        found: Formula = self.memo[key]
        return found

    def _read(self, number: int, kind: str) -> Formula:
        if number == TRUE:
            return YES
        name, what, more = self._nodes[number]
        if name == "either":
            return Or(tuple(Is(literal) for literal in what))
        if name == "schema":
            return Reader(self, what, more, kind).read()
        if kind in SCALARS:
            same = kind_of(what) == kind
            return Reader(self, more, (), kind).constants([what] if same else [])
        return constant(what, kind, lambda value: self.constant(value, more))

    def weaken(self, what: Unsupported) -> None:
        """Take note of what is not enforced; refuse it unless that was asked for."""
        if not self.options.loose:
            raise UnsupportedSchemaError.of(what)
        self.loose[what] = None

    def once(self, key: Any, literal: int, compute: Any) -> Any:
        """Remember an answer; a question inside its own answer is a reference to itself.

        Unless the question was whether a member can exist: then it stays open (``Again``).
        """
        if key not in self.memo:
            if key in self.open:
                later = list(self.open)[list(self.open).index(key) :]
                if any(other[0] == "empty" for other in later):
                    raise Again
                what = "it leads back to itself without a step into a member"
                raise self.place(literal).refuse("$ref", what, "a reference inside a member")
            self.open[key] = None
            try:
                self.memo[key] = compute()
            finally:
                del self.open[key]
        return self.memo[key]
