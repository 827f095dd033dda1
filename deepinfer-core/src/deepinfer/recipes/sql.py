"""SQL from questions: written under a grammar of the database's own names, then validated.

The grammar (``sql_grammar``) knows tables, columns and foreign keys, so the query parses and names
what exists; the check reads it with sqlglot, another program than the one that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from deepinfer.errors import UnsupportedError
from deepinfer.recipes.interface import Ask, Options, json_answer, told
from deepinfer.recipes.sql_grammar import Database, examples_of, grammar

_MOST_PROBLEMS = 3
_CHANGES = ("Insert", "Update", "Delete", "Merge", "Into")  # what a query may hold, in a WITH


class SQLGeneration(Options):
    """One ``SELECT`` for a question. The value is the query's text.

    Args:
        ddl: the database's ``CREATE TABLE`` statements.
        dialect: sqlglot's name of the SQL that is read and written.
        queries: ``subset`` writes under a grammar of one or two joined tables with conditions,
            grouping, ordering and limit, in which every query is valid. ``any`` leaves the query
            to the model and relies on the check and its repairs.
        instructions: what the columns mean, in your words.
        examples: (question, query) pairs that are shown to the model first; None makes some of the
            database's own names.
        max_text: the longest query (``any``) and text literal (``subset``), in characters.
    """

    name: ClassVar[str] = "sql"

    ddl: str
    dialect: str = "sqlite"
    queries: Literal["subset", "any"] = "subset"
    instructions: str = ""
    examples: tuple[tuple[str, str], ...] | None = None
    max_text: int = Field(default=400, ge=1)

    def __init__(self, **options: Any) -> None:
        _sqlglot()  # said before a model is loaded
        super().__init__(**options)

    @field_validator("dialect")
    @classmethod
    def _known(cls, value: str) -> str:
        dialects = sorted(name for name in _sqlglot().Dialect.classes if name)
        if value not in dialects:
            raise ValueError(f"sqlglot knows {', '.join(dialects)}")
        return value

    def parts(self, text: str) -> Sequence[Ask]:
        """One question."""
        database = self.database()
        if self.queries == "subset":
            rule = grammar(database, min(self.max_text, 60))
            so_args: Any = {"schema_type": "ebnf", "schema": rule}
        else:
            field = {"type": "string", "minLength": 1, "maxLength": self.max_text}
            so_args = json_answer(
                {
                    "type": "object",
                    "properties": {"sql": field},
                    "required": ["sql"],
                    "additionalProperties": False,
                }
            )
        shown = examples_of(database) if self.examples is None else list(self.examples)
        is_json = self.queries == "any"
        turns = [(asked, {"sql": query} if is_json else f"{query};") for asked, query in shown]
        return [Ask(told(self._system(), text, turns), so_args, text, is_json)]

    def problems(self, ask: Ask, answer: Any) -> Sequence[str]:
        """What is wrong with a query; see :meth:`check_query`."""
        return self.check_query(answer if isinstance(answer, str) else answer["sql"])

    def merge(self, text: str, answers: Sequence[Any]) -> str:
        """The query."""
        answer = answers[0]
        query: str = answer if isinstance(answer, str) else answer["sql"]
        return query.rstrip().removesuffix(";")

    def database(self) -> Database:
        """What the DDL defines."""
        return Database.read(self.ddl, self.dialect)

    def check_query(self, query: str) -> list[str]:
        """Sentences on a query: it must be one ``SELECT`` whose tables and columns exist."""
        sqlglot = _sqlglot()
        from sqlglot.errors import OptimizeError, ParseError, SqlglotError
        from sqlglot.optimizer.qualify import qualify

        try:
            statements = [s for s in sqlglot.parse(query, read=self.dialect) if s is not None]
        except RecursionError:
            return ["It is nested too deep."]
        except SqlglotError as why:
            first = (
                why.errors[0]["description"] if isinstance(why, ParseError) and why.errors else why
            )
            return [f"It is no {self.dialect} SQL: {first}."]
        if len(statements) != 1:
            return [f"It holds {len(statements)} statements; one is wanted."]
        (tree,) = statements
        writes = tree.find(*(getattr(sqlglot.exp, name) for name in _CHANGES))
        if not isinstance(tree, sqlglot.exp.Query) or writes is not None:
            key = (writes or tree).key.upper()
            return [f"It is no query ({key}); only SELECT is allowed."]
        if not all(select.expressions for select in tree.find_all(sqlglot.exp.Select)):
            return ["It selects nothing."]
        tables = self.database().tables
        names = {name.lower(): name for name in tables}
        local = {cte.alias_or_name.lower() for cte in tree.find_all(sqlglot.exp.CTE)}
        asked = {table.name for table in tree.find_all(sqlglot.exp.Table)}
        absent = sorted(n for n in asked if n.lower() not in names and n.lower() not in local)
        if absent:
            known = ", ".join(tables)
            return [f"There is no table {name}; there are {known}." for name in absent][
                :_MOST_PROBLEMS
            ]
        try:
            qualify(tree, schema=dict(tables), dialect=self.dialect)
        except RecursionError:
            return ["It is nested too deep."]
        except OptimizeError as why:
            return [f"{str(why).splitlines()[0].rstrip('.')}."]
        return []

    def _system(self) -> str:
        more = f"\n{self.instructions}" if self.instructions else ""
        shape = "Answer with the query alone." if self.queries == "subset" else "Answer in JSON."
        return (
            f"Write one {self.dialect} SELECT query that answers the question. {shape}\n"
            f"The database:\n{self.ddl.strip()}{more}"
        )


def _sqlglot() -> Any:
    try:
        import sqlglot
    except ImportError:
        raise UnsupportedError(
            "The recipe sql needs sqlglot, which is not installed.",
            setting="sql",
            next_step='Install "deepinfer-core[recipes]".',
        ) from None
    return sqlglot
