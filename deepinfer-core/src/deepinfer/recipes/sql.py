"""SQL from questions: written under a grammar of the database's own names, then validated.

The grammar (``sql_grammar``) knows tables, columns and foreign keys, so the query parses and names
what exists; the check (``sql_check``) reads it with another program than the one that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from deepinfer.errors import UnsupportedError
from deepinfer.recipes.interface import Ask, Options, json_answer, told
from deepinfer.recipes.sql_check import problems_of
from deepinfer.recipes.sql_grammar import Database, examples_of, grammar


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
        functions: names of functions that a query may call beside those that are known to compute
            and do nothing else.
        max_text: the longest query (``any``) and text literal (``subset``), in characters.
    """

    name: ClassVar[str] = "sql"

    ddl: str
    dialect: str = "sqlite"
    queries: Literal["subset", "any"] = "subset"
    instructions: str = ""
    examples: tuple[tuple[str, str], ...] | None = None
    functions: tuple[str, ...] = ()
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
        """Sentences on a query: it must be one ``SELECT`` that only reads, of what exists."""
        return problems_of(query, self.database(), self.dialect, self.functions)

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
