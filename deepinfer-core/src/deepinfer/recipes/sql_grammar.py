"""A grammar of queries over one database: every text of it is a query that can be run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.errors import InvalidRequestError

ColumnKind = Literal["number", "text", "other"]


@dataclass(frozen=True, slots=True)
class Database:
    """What a grammar must know.

    ``tables``: table → column → SQL type. ``places``: table → the schema that the DDL puts it in,
    and what that lies in, outermost first. ``kinds``: table → column → what its literals look like.
    ``keys``: (table, column, other table, other column) of foreign keys. ``written``: names as the
    DDL has them, quoted or not.
    """

    tables: Mapping[str, Mapping[str, str]]
    places: Mapping[str, tuple[str, ...]]
    kinds: Mapping[str, Mapping[str, ColumnKind]]
    keys: tuple[tuple[str, str, str, str], ...]
    written: Mapping[str, str]

    @classmethod
    def read(cls, ddl: str, dialect: str) -> Database:
        """Parse ``CREATE TABLE`` statements.

        Raises:
            InvalidRequestError: they do not parse, define no table, or one twice.
        """
        import sqlglot
        from sqlglot import exp
        from sqlglot.errors import SqlglotError

        try:
            statements = sqlglot.parse(ddl, read=dialect)
        except RecursionError:
            raise _no("ddl is nested too deep") from None
        except SqlglotError as why:
            raise _no(f"ddl is no {dialect} SQL: {str(why).splitlines()[0]}") from why
        tables: dict[str, dict[str, str]] = {}
        places: dict[str, tuple[str, ...]] = {}
        kinds: dict[str, dict[str, ColumnKind]] = {}
        keys: list[tuple[str, str, str, str]] = []
        for statement in statements:
            if not isinstance(statement, exp.Create) or statement.kind != "TABLE":
                continue
            table = statement.this.find(exp.Table)
            name = table.name
            if name.lower() in map(str.lower, tables):
                raise _no(f"ddl defines the table {name} twice")
            places[name] = tuple(part.name for part in table.parts[:-1])
            columns = list(statement.this.find_all(exp.ColumnDef))
            tables[name] = {c.name: c.kind.sql(dialect) if c.kind else "TEXT" for c in columns}
            kinds[name] = {c.name: _kind(c.kind) for c in columns}
            keys += [(name, *key) for column in columns for key in _references(column, exp)]
            keys += [(name, *key) for key in _foreign_keys(statement, exp)]
        if not any(tables.values()):
            raise _no("ddl defines no table with columns")
        # As the DDL writes them: whoever made the table had to quote what needs it.
        written = {
            i.name: i.sql(dialect) for s in statements if s for i in s.find_all(exp.Identifier)
        }
        known = [k for k in dict.fromkeys(keys) if k[2] in tables and k[3] in tables[k[2]]]
        return cls(tables, places, kinds, tuple(known), written)

    def source(self, table: str) -> str:
        """A table as a query names it: as the DDL does, with its schema if it has one there."""
        return ".".join(self.written[part] for part in (*self.places[table], table))


def grammar(database: Database, longest_text: int) -> str:
    """EBNF of ``SELECT`` over each table and over each pair that a foreign key joins."""
    rules: list[str] = []
    sources = [_alone(database, table) for table in database.tables if database.tables[table]]
    sources += [_joined(database, *key) for key in database.keys]
    for number, (source, columns) in enumerate(sources):
        rules += _source_rules(f"q{number}", source, columns)
    heads = " | ".join(f"q{number}" for number in range(len(sources)))
    # A text holds no quotes and no backslash, which dialects read differently.
    return "\n".join(
        [
            # Most models end a query with a semicolon, and without one they would write on.
            f'root ::= ({heads}) ";"?',
            *rules,
            'limit ::= " LIMIT " [1-9] [0-9]{0,2}',
            'direction ::= (" ASC" | " DESC")?',
            'compare ::= " = " | " <> " | " < " | " <= " | " > " | " >= "',
            'number ::= "-"? ("0" | [1-9] [0-9]{0,8}) ("." [0-9]{1,4})?',
            f"""text ::= "'" [^'"\\\\\\x00-\\x1f]{{0,{longest_text}}} "'" """.rstrip(),
        ]
    )


def examples_of(database: Database) -> list[tuple[str, str]]:
    """Questions with their queries, made of the database's own names."""
    said, source, found = database.written, database.source, list[tuple[str, str]]()
    for table, kinds in list(database.kinds.items())[:2]:
        found.append(
            (f"How many rows of {table} are there?", f"SELECT COUNT(*) FROM {source(table)}")
        )
        for column in [name for name, kind in kinds.items() if kind == "text"][:1]:
            name = said[column]
            found += [
                (f"List every {column} of {table}.", f"SELECT {name} FROM {source(table)}"),
                (
                    f"Which {table} has the {column} X?",
                    f"SELECT * FROM {source(table)} WHERE {name} = 'X'",
                ),
            ]
        for column in [name for name, kind in kinds.items() if kind == "number"][-1:]:
            query = f"SELECT MAX({said[column]}) FROM {source(table)}"
            found.append((f"What is the highest {column} of {table}?", query))
    for one, left, two, right in database.keys[:1]:
        both = f"{source(one)} AS a JOIN {source(two)} AS b ON a.{said[left]} = b.{said[right]}"
        asked = f"Count {one} for each {right} of {two}."
        query = f"SELECT b.{said[right]}, COUNT(*) FROM {both} GROUP BY b.{said[right]}"
        found.append((asked, query))
    return found


def _source_rules(q: str, source: str, columns: list[tuple[str, ColumnKind]]) -> list[str]:
    """Plain, aggregated and grouped queries over one FROM."""
    every = [name for name, _ in columns]
    counts = ['"COUNT(*)"', f'"COUNT(DISTINCT " {q}col ")"']
    numbers = [name for name, kind in columns if kind == "number"]
    sums = [f'("SUM(" | "AVG(" | "MIN(" | "MAX(") {q}n ")"'] if numbers else []
    grouped = [
        f"{_lit(f'SELECT {name}, ')} {q}aggs {q}from {_lit(f' GROUP BY {name}')} "
        f'(" ORDER BY " ({_lit(name)} | {q}agg) direction)?'
        for name in every
    ]
    rules = [
        f'{q} ::= ("SELECT " ("DISTINCT ")? ("*" | {q}cols) {q}from '
        f'(" ORDER BY " {q}col direction)? | "SELECT " {q}aggs {q}from | {q}groups) limit?',
        f"{q}groups ::= {' | '.join(grouped)}",
        f'{q}from ::= {_lit(f" FROM {source}")} (" WHERE " {q}if)?',
        f'{q}cols ::= {q}col (", " {q}col){{0,5}}',
        f"{q}col ::= {_any(every)}",
        f'{q}aggs ::= {q}agg (", " {q}agg){{0,2}}',
        f"{q}agg ::= {' | '.join(counts + sums)}",
        f'{q}if ::= {q}is ((" AND " | " OR ") {q}is){{0,3}}',
        f"{q}is ::= {' | '.join(_conditions(q, columns))}",
    ]
    if numbers:
        rules.append(f"{q}n ::= {_any(numbers)}")
    texts = [name for name, kind in columns if kind == "text"]
    if texts:
        rules.append(f"{q}t ::= {_any(texts)}")
    return rules


def _conditions(q: str, columns: list[tuple[str, ColumnKind]]) -> list[str]:
    kinds = {kind for _, kind in columns}
    found = [f'{q}col (" IS NULL" | " IS NOT NULL")']
    if "number" in kinds:
        found += [f"{q}n compare number", f'{q}n " BETWEEN " number " AND " number']
    if "text" in kinds:
        found.append(f'{q}t (compare | " LIKE ") text')
    return found


def _alone(database: Database, table: str) -> tuple[str, list[tuple[str, ColumnKind]]]:
    kinds = database.kinds[table].items()
    return database.source(table), [(database.written[column], kind) for column, kind in kinds]


def _joined(
    database: Database, one: str, left: str, two: str, right: str
) -> tuple[str, list[tuple[str, ColumnKind]]]:
    """Both tables under short names, since they may be the same one."""
    said = database.written
    source = (
        f"{database.source(one)} AS a JOIN {database.source(two)} AS b "
        f"ON a.{said[left]} = b.{said[right]}"
    )
    columns = [
        (f"{alias}.{said[column]}", kind)
        for alias, table in (("a", one), ("b", two))
        for column, kind in database.kinds[table].items()
    ]
    return source, columns


def _any(texts: Iterable[str]) -> str:
    return " | ".join(map(_lit, texts))


def _lit(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _kind(kind: Any) -> ColumnKind:
    from sqlglot import exp

    if kind is None:
        return "text"
    if kind.is_type(*exp.DataType.NUMERIC_TYPES):
        return "number"
    dates = (exp.DataType.Type.DATE, exp.DataType.Type.DATETIME, exp.DataType.Type.TIMESTAMP)
    return "text" if kind.is_type(*exp.DataType.TEXT_TYPES, *dates) else "other"


def _references(column: Any, exp: Any) -> list[tuple[str, str, str]]:
    """``REFERENCES other (column)`` at a column."""
    found = []
    for reference in column.find_all(exp.Reference):
        found += [(column.name, table, name) for table, name in _targets(reference, exp)]
    return found


def _foreign_keys(statement: Any, exp: Any) -> list[tuple[str, str, str]]:
    """``FOREIGN KEY (column) REFERENCES other (column)`` of a table, of one column each."""
    found = []
    for key in statement.find_all(exp.ForeignKey):
        reference = key.args.get("reference")
        if reference is not None and len(key.expressions) == 1:
            own = key.expressions[0].name
            found += [(own, table, name) for table, name in _targets(reference, exp)]
    return found


def _targets(reference: Any, exp: Any) -> list[tuple[str, str]]:
    """The referenced table and its column; nothing where the column is left to the reader."""
    table = reference.find(exp.Table)
    columns = [e.name for e in getattr(reference.this, "expressions", [])]
    return [(table.name, columns[0])] if table is not None and len(columns) == 1 else []


def _no(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what}.", setting="ddl", next_step="Give CREATE TABLE statements.")
