"""Keywords to formulas: JSON Schema 2020-12, the applicator, validation and unevaluated ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from deepinfer_structured.schema.automata import (
    ANY,
    Automaton,
    Language,
    Strings,
    Words,
    complement,
    meet,
)
from deepinfer_structured.schema.errors import UnsupportedSchemaError
from deepinfer_structured.schema.formats import ANNOTATIONS, FORMATS
from deepinfer_structured.schema.formula import (
    FALSE,
    NO,
    TRUE,
    YES,
    All,
    And,
    Asked,
    At,
    Cases,
    Choice,
    Count,
    Formula,
    Is,
    Keys,
    Not,
    OneOf,
    Or,
    Rest,
    Seen,
    SeenItems,
    Size,
    Some,
    Unique,
    Unknown,
    Values,
    items_from,
)  # fmt: skip
from deepinfer_structured.schema.numbers import Numbers, compared, integers, multiples, only
from deepinfer_structured.schema.regex import regex
from deepinfer_structured.schema.resolve import Place, escaped

if TYPE_CHECKING:
    from deepinfer_structured.schema.nodes import Nodes

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
UNIVERSES = {"null": frozenset([None]), "boolean": frozenset([True, False])}
REGULAR = frozenset(
    "pattern format multipleOf patternProperties propertyNames additionalProperties".split()
)
SIGNS = {
    "maximum": frozenset([-1, 0]), "exclusiveMaximum": frozenset([-1]),
    "minimum": frozenset([0, 1]), "exclusiveMinimum": frozenset([1]),
}  # fmt: skip


def kind_of(value: Any) -> str:
    """The type of a JSON value; integers are numbers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class Reader:
    """Reads one subschema for one type.

    Args:
        kind: one of ``formula.KINDS``.
        scope: the resources entered on the way, for ``$dynamicRef``.
    """

    def __init__(self, nodes: Nodes, place: Place, scope: tuple[str, ...], kind: str) -> None:
        self.nodes, self.place, self.scope, self.kind = nodes, place, scope, kind

    def read(self) -> Formula:
        """The formula of the whole subschema."""
        schema = self.place.schema
        if isinstance(schema, bool):
            return YES if schema else NO
        parts = [self._part(keyword, schema) for keyword in schema]
        formula: Formula = And(tuple(part for part in parts if part != YES))
        last = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}.get(self.kind)
        if last in schema:
            formula = Rest(formula, self.child(f"/{last}"))
            if formula.literal != FALSE and self.kind == "object":
                formula = And((formula, Asked(ANY)))
        return formula

    def _part(self, keyword: str, schema: dict[str, Any]) -> Formula:
        handler = IN_PLACE.get(keyword) or BY_KIND[self.kind].get(keyword)
        if handler is None:
            return YES
        try:
            return handler(self, keyword, schema[keyword])
        except UnsupportedSchemaError as error:
            if self.nodes.options.loose and keyword in REGULAR:
                return Unknown(error.unsupported)
            raise

    def child(self, token: str) -> int:
        """The literal of a subschema below."""
        place = self.nodes.schemas.places[self.place.document, self.place.pointer + token]
        return self.nodes.node(place, self.scope)

    def each(self, keyword: str) -> list[int]:
        """The literals of a list of subschemas."""
        return [self.child(f"/{keyword}/{i}") for i in range(len(self.place.schema[keyword]))]

    def named(self, keyword: str) -> Iterator[tuple[str, int]]:
        """The literals of an object of subschemas."""
        for name in self.place.schema.get(keyword, {}):
            yield name, self.child(f"/{keyword}/{escaped(name)}")

    def refuse(self, keyword: str, reason: str, instead: str) -> UnsupportedSchemaError:
        """The error about a keyword here."""
        return self.place.refuse(keyword, reason, instead)

    def whole(self, keyword: str, value: Any) -> int:
        """A value that counts something."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
            raise self.refuse(keyword, "it is no whole number from 0", "0, 1, 2, ...")
        return int(value)

    def number(self, keyword: str, value: Any) -> int | float:
        """A value that is a number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(keyword, "it is no number", "a number")
        return value

    def texts(self, keyword: str, value: Any) -> list[str]:
        """A value that lists strings."""
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refuse(keyword, "it is no list of strings", '["name", ...]')
        return list(value)

    # In place: keywords that say something about the value as a whole.

    def type(self, keyword: str, value: Any) -> Formula:
        names = [value] if isinstance(value, str) else self.texts(keyword, value)
        if unknown := [name for name in names if name not in TYPES]:
            raise self.refuse(keyword, f"no type is called {unknown[0]!r}", ", ".join(TYPES))
        if self.kind == "number" and "number" not in names and "integer" in names:
            return Values(Numbers(integers()))
        return YES if self.kind in names else NO

    def enum(self, keyword: str, value: Any) -> Formula:
        if not isinstance(value, list):
            raise self.refuse(keyword, "it is no list", "[value, ...]")
        return self.constants([item for item in value if kind_of(item) == self.kind])

    def const(self, keyword: str, value: Any) -> Formula:
        return self.constants([value] if kind_of(value) == self.kind else [])

    def constants(self, values: list[Any]) -> Formula:
        """The value is one of these, all of this type."""
        if self.kind == "number":
            return Values(only(values))
        if self.kind == "string":
            return Values(Strings(((Words(frozenset(values)), 0, None),)))
        if self.kind in UNIVERSES:
            return Values(Choice(frozenset(values), UNIVERSES[self.kind]))
        distinct = {json.dumps(value, sort_keys=True): value for value in values}.values()
        return Or(tuple(Is(self.nodes.constant(value, self.place)) for value in distinct))

    def reference(self, keyword: str, value: Any) -> Formula:
        schemas = self.nodes.schemas
        if keyword == "$ref":
            target = schemas.find(self.place, keyword)
        else:
            target = schemas.dynamically(self.place, self.scope)
        return Is(self.nodes.node(target, self.scope))

    def all_of(self, keyword: str, value: Any) -> Formula:
        return And(tuple(Is(literal) for literal in self.each(keyword)))

    def any_of(self, keyword: str, value: Any) -> Formula:
        return Or(tuple(Is(literal) for literal in self.each(keyword)))

    def one_of(self, keyword: str, value: Any) -> Formula:
        return OneOf(tuple(self.each(keyword)))

    def negation(self, keyword: str, value: Any) -> Formula:
        return Not(Is(self.child("/not")))

    def condition(self, keyword: str, value: Any) -> Formula:
        then, other = (
            self.child(f"/{name}") if name in self.place.schema else TRUE
            for name in ("then", "else")
        )
        return Cases(self.child("/if"), then, other)

    # Numbers and strings.

    def bound(self, keyword: str, value: Any) -> Formula:
        return Values(Numbers(compared(self.number(keyword, value), SIGNS[keyword])))

    def multiple(self, keyword: str, value: Any) -> Formula:
        if self.number(keyword, value) <= 0:
            raise self.refuse(keyword, "it is not above 0", "a positive number")
        return Values(Numbers(multiples(value, f"{self.place.path}/multipleOf")))

    def length(self, keyword: str, value: Any) -> Formula:
        count = self.whole(keyword, value)
        low, high = (0, count) if keyword == "maxLength" else (count, None)
        return Values(Strings(((ANY, low, high),)))

    def pattern(self, keyword: str, value: Any) -> Formula:
        return Values(Strings(((self.machine(keyword, value), 0, None),)))

    def machine(self, keyword: str, value: Any) -> Automaton:
        """A pattern, searched for."""
        if not isinstance(value, str):
            raise self.refuse(keyword, "it is no string", "a regular expression")
        return regex(value, True, f"{self.place.path}/{keyword}", keyword)

    def format(self, keyword: str, value: Any) -> Formula:
        if self.nodes.options.formats == "annotate" or not isinstance(value, str):
            return YES
        if value in FORMATS:
            machine = regex(FORMATS[value], False, self.place.path, keyword)
            return Values(Strings(((machine, 0, None),)), narrowed=True)
        what = "is not enforced" if value in ANNOTATIONS else "is unknown"
        instead = "a pattern, or formats='annotate' if any string will do"
        raise self.refuse(keyword, f"the format {value!r} {what}", instead)

    # Arrays.

    def prefix(self, keyword: str, value: Any) -> Formula:
        items = self.each(keyword)
        return And((*(At(i, lit) for i, lit in enumerate(items)), SeenItems(len(items))))

    def items(self, keyword: str, value: Any) -> Formula:
        start = len(self.place.schema.get("prefixItems", ()))
        return And((items_from(start, self.child("/items")), SeenItems(None)))

    def contains(self, keyword: str, value: Any) -> Formula:
        schema, literal = self.place.schema, self.child("/contains")
        low = self.whole("minContains", schema.get("minContains", 1))
        high = schema.get("maxContains")
        high = None if high is None else self.whole("maxContains", high)
        return And((Count(0, literal, low, high), SeenItems(0, literal)))

    def array_size(self, keyword: str, value: Any) -> Formula:
        count = self.whole(keyword, value)
        return Count(0, TRUE, *((0, count) if keyword == "maxItems" else (count, None)))

    def unique(self, keyword: str, value: Any) -> Formula:
        if not isinstance(value, bool):
            raise self.refuse(keyword, "it is no boolean", "true or false")
        return Unique(f"{self.place.path}/{keyword}") if value else YES

    # Objects.

    def properties(self, keyword: str, value: Any) -> Formula:
        each = [All(Words(frozenset([name])), lit) for name, lit in self.named(keyword)]
        return And((*each, Seen(Words(frozenset(value)))))

    def pattern_properties(self, keyword: str, value: Any) -> Formula:
        out: list[Formula] = []
        for pattern, literal in self.named(keyword):
            names = self.machine(keyword, pattern)
            out += [All(names, literal), Seen(names), *[Asked(names)] * (literal != FALSE)]
        return And(tuple(out))

    def additional(self, keyword: str, value: Any) -> Formula:
        schema, literal = self.place.schema, self.child(f"/{keyword}")
        names: Language = Words(frozenset(schema.get("properties", ())), negated=True)
        for pattern in schema.get("patternProperties", ()):
            names = meet(names, complement(self.machine("patternProperties", pattern)))
        return And((All(names, literal), Seen(names), *[Asked(names)] * (literal != FALSE)))

    def property_names(self, keyword: str, value: Any) -> Formula:
        return Keys(self.child(f"/{keyword}"))

    def required(self, keyword: str, value: Any) -> Formula:
        return And(tuple(has(name) for name in self.texts(keyword, value)))

    def dependent_required(self, keyword: str, value: Any) -> Formula:
        if not isinstance(value, dict):
            raise self.refuse(keyword, "it is no object", '{"name": ["other", ...], ...}')
        return And(tuple(
            either_lacks(name, And(tuple(has(other) for other in self.texts(keyword, others))))
            for name, others in value.items()
        ))  # fmt: skip

    def dependent_schemas(self, keyword: str, value: Any) -> Formula:
        return And(tuple(either_lacks(name, Is(lit)) for name, lit in self.named(keyword)))

    def object_size(self, keyword: str, value: Any) -> Formula:
        count = self.whole(keyword, value)
        return Size(0, count) if keyword == "maxProperties" else Size(count, None)


def has(name: str) -> Formula:
    """A key is there."""
    return Some(Words(frozenset([name])), TRUE)


def either_lacks(name: str, formula: Formula) -> Formula:
    """A key is not there, or it is and a formula holds."""
    return Or((All(Words(frozenset([name])), FALSE), And((has(name), formula))), apart=True)


def constant(value: Any, kind: str, literal: Callable[[Any], int]) -> Formula:
    """The value equals an array or an object; ``literal`` gives that of a member."""
    if kind_of(value) != kind:
        return NO
    if isinstance(value, list):
        items = tuple(At(i, literal(item)) for i, item in enumerate(value))
        return And((*items, Count(0, TRUE, len(value), len(value))))
    each: list[Formula] = []
    for name, member in value.items():
        each += [All(Words(frozenset([name])), literal(member)), has(name)]
    return And((*each, All(Words(frozenset(value), negated=True), FALSE)))


Handler = Callable[[Reader, str, Any], Formula]
IN_PLACE: dict[str, Handler] = {
    "type": Reader.type, "enum": Reader.enum, "const": Reader.const, "$ref": Reader.reference,
    "$dynamicRef": Reader.reference, "allOf": Reader.all_of, "anyOf": Reader.any_of,
    "oneOf": Reader.one_of, "not": Reader.negation, "if": Reader.condition,
}  # fmt: skip
BY_KIND: dict[str, dict[str, Handler]] = {
    "null": {}, "boolean": {},
    "number": {"multipleOf": Reader.multiple, **dict.fromkeys(SIGNS, Reader.bound)},
    "string": {
        "minLength": Reader.length, "maxLength": Reader.length, "pattern": Reader.pattern,
        "format": Reader.format,
    },
    "array": {
        "prefixItems": Reader.prefix, "items": Reader.items, "contains": Reader.contains,
        "minItems": Reader.array_size, "maxItems": Reader.array_size,
        "uniqueItems": Reader.unique,
    },
    "object": {
        "properties": Reader.properties, "patternProperties": Reader.pattern_properties,
        "additionalProperties": Reader.additional, "propertyNames": Reader.property_names,
        "required": Reader.required, "dependentRequired": Reader.dependent_required,
        "dependentSchemas": Reader.dependent_schemas, "minProperties": Reader.object_size,
        "maxProperties": Reader.object_size,
    },
}  # fmt: skip
