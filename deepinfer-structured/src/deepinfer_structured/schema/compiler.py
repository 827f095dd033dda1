"""From a schema to a grammar: states are worked off one by one, each becomes a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_structured.schema.algebra import Algebra
from deepinfer_structured.schema.arrays import ArrayWriter
from deepinfer_structured.schema.automata import Words
from deepinfer_structured.schema.branches import State
from deepinfer_structured.schema.errors import Unsupported, UnsupportedSchemaError
from deepinfer_structured.schema.formula import SCALARS, TRUE
from deepinfer_structured.schema.limits import SchemaOptions, working
from deepinfer_structured.schema.numbers import spelled
from deepinfer_structured.schema.objects import ObjectWriter
from deepinfer_structured.schema.regex import regex
from deepinfer_structured.schema.resolve import Place, Schemas, clean
from deepinfer_structured.schema.write import Key, Ref, Repeat, Rules, Sequence_, written


@dataclass(frozen=True, slots=True)
class CompiledSchema:
    """A grammar in xgrammar's EBNF; its first rule is ``root``.

    Args:
        ebnf: the grammar; each of its texts is JSON and valid, but for what ``loose`` lists.
        loose: what the grammar does not enforce, empty unless ``SchemaOptions.loose``.
    """

    ebnf: str
    loose: tuple[Unsupported, ...] = ()


class Builder:
    """The rules of one schema while they are made."""

    def __init__(self, algebra: Algebra, options: SchemaOptions) -> None:
        self.algebra, self.options = algebra, options
        self.rules = Rules(options.max_rules)
        self.later: list[Callable[[], object]] = []
        self._given = 0
        self._asked: set[Key] = set()
        self._orders: dict[State, dict[str, int]] = {}

    def value(self, state: State) -> Ref:
        """The rule of all values that a state allows."""
        state -= {TRUE}
        key = ("value", state)
        if key not in self._asked:
            self._asked.add(key)
            self.later.append(lambda: self._write(key, state))
        return Ref(key)

    def fresh(self) -> int:
        """A number to tell the rules of one array or object from those of others."""
        self._given += 1
        return self._given

    def run(self) -> None:
        """Write what was put off, until nothing is left."""
        while self.later:
            self.later.pop()()

    def _write(self, key: Key, state: State) -> None:
        """The rule of a state; limits are said to be reached there."""
        try:
            self.rules.add(key, self._alternatives(state))
        except UnsupportedSchemaError as error:
            what = error.unsupported
            if what.path:
                raise
            path = self.path(state)
            raise UnsupportedSchemaError(path, what.keyword, what.reason, what.instead) from None

    def _alternatives(self, state: State) -> list[Sequence_]:
        algebra, lines = self.algebra, list[Sequence_]()
        if algebra.empty(state):
            return []
        lines += [("null",)] * (not algebra.sets.of(state, SCALARS[0]).empty)
        for value in algebra.sets.of(state, "boolean").values:
            lines.append(("true" if value else "false",))
        for language in spelled(algebra.sets.of(state, "number").language, self.options):
            lines += self.rules.texts(language)
        for part in algebra.sets.of(state, "string").parts:
            lines += self.rules.strings(*part)
        for branch in algebra.branches(state, "array"):
            lines.append(ArrayWriter(self, state, branch).write())
        for branch in algebra.branches(state, "object"):
            lines.append(ObjectWriter(self, state, branch).write())
        return lines

    def space(self) -> Ref:
        """White space where it may stand: never without bound, for models loop in it."""
        most = self.options.max_whitespace
        lines: list[Sequence_] = [()] + [(" ",)] * (most > 0)
        if most > 1:
            self.rules.add("blank", [(" ",), ("\t",)])
            lines.append(("\n", Repeat("blank", 0, most - 1)))
        return self.rules.add("space", lines)

    def path(self, state: State) -> str:
        """Where a state comes from."""
        return self.algebra.nodes.place(min(state, key=abs, default=TRUE)).path

    def order(self, state: State) -> dict[str, int]:
        """Ranks of the names that a state lists: own properties, then those of subschemas."""
        if state not in self._orders:
            names: dict[str, None] = {}
            for literal in sorted(state, key=abs):
                self._collect(self.algebra.nodes.place(literal), names, set())
            self._orders[state] = {name: rank for rank, name in enumerate(names)}
        return self._orders[state]

    def _collect(self, place: Place, names: dict[str, None], seen: set[Place]) -> None:
        schema, schemas = place.schema, self.algebra.nodes.schemas
        if place in seen or not isinstance(schema, dict):
            return
        seen.add(place)
        names.update(dict.fromkeys(schema.get("properties", ())))
        tokens = [f"/{name}" for name in ("if", "then", "else", "not") if name in schema]
        for keyword in ("allOf", "anyOf", "oneOf"):
            tokens += [f"/{keyword}/{i}" for i in range(len(schema.get(keyword, ())))]
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                self._collect(schemas.find(place, keyword), names, seen)
        for token in tokens:
            below = schemas.places.get((place.document, place.pointer + token))
            if below is not None:
                self._collect(below, names, seen)
        names.update(dict.fromkeys(schema.get("required", ())))


def compile_schema(schema: Any, options: SchemaOptions | None = None) -> CompiledSchema:
    """A grammar whose texts are instances of a JSON Schema (2020-12).

    Args:
        schema: a schema as ``json.loads`` gives it, or what ``json.dumps`` can write.

    Returns:
        the grammar. Every text of it parses to a valid instance. Left out are some spellings of
        valid ones, see ``docs/structured-coverage.md``.

    Raises:
        UnsupportedSchemaError: what is not enforced, not satisfiable, malformed or too large.
    """
    options = options or SchemaOptions()
    try:
        with working(options.max_work):
            return _compiled(clean(schema, options), options)
    except RecursionError:
        what = "its subschemas refer to each other too deep"
        raise UnsupportedSchemaError("", "schema", what, "a flatter schema") from None


def _compiled(schema: Any, options: SchemaOptions) -> CompiledSchema:
    algebra = Algebra(Schemas(schema, options), options)
    builder = Builder(algebra, options)
    root = builder.value(frozenset([algebra.nodes.node(algebra.nodes.schemas.root)]))
    builder.run()
    done = builder.rules.productive()
    if root.key not in done:
        blamed = algebra.blamed
        path = blamed.path if blamed else _culprit(builder, root.key, done)
        raise UnsupportedSchemaError(path, "schema", "no value satisfies it", "one that can be met")
    return CompiledSchema(written(builder.rules, root.key), tuple(algebra.nodes.loose))


def _culprit(builder: Builder, key: Key, done: set[Key]) -> str:
    """The deepest subschema on the way that nothing satisfies."""
    path, seen = "", set[Key]()
    while key not in seen:
        seen.add(key)
        if isinstance(key, tuple) and key[0] == "value" and key[1]:
            path = builder.path(key[1])
        lines = builder.rules.rules[key]
        refs = [s.key for line in lines for s in line if isinstance(s, Ref) and s.key not in done]
        key = refs[0] if refs else key
    return path


def compile_regex(pattern: str, options: SchemaOptions | None = None) -> CompiledSchema:
    """A grammar whose texts are the whole matches of a regular expression (ECMA-262).

    Raises:
        UnsupportedSchemaError: it names the construct that is not regular, or not of ECMA-262.
    """
    options = options or SchemaOptions()
    with working(options.max_work):
        machine = regex(pattern, False, "", "regex")
        if machine.empty:
            raise UnsupportedSchemaError("", "regex", "no text matches it", "one that matches")
        rules = Rules(options.max_rules)
        root = rules.add("root", rules.texts(machine))
        return CompiledSchema(written(rules, root.key))


def compile_choice(choices: Sequence[str], options: SchemaOptions | None = None) -> CompiledSchema:
    """A grammar whose texts are these and no others.

    Raises:
        UnsupportedSchemaError: no choices, or one that is no string or empty.
    """
    options = options or SchemaOptions()
    if not choices or not all(isinstance(text, str) and text for text in choices):
        what = "it is no list of texts that are not empty"
        raise UnsupportedSchemaError("", "choice", what, '["yes", "no"]')
    with working(options.max_work):
        rules = Rules(options.max_rules)
        root = rules.add("root", rules.texts(Words(frozenset(choices))))
        return CompiledSchema(written(rules, root.key))
