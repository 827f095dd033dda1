"""Recipes without a model: questions, checks, merging and the repair loop."""

import asyncio
import json
import sqlite3
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import pytest
from deepinfer import SamplingParams
from deepinfer.errors import InvalidRequestError, UnsupportedError
from deepinfer.recipes import (
    Classification,
    NamedEntities,
    SQLGeneration,
    Transformation,
    arun,
    run,
)
from deepinfer.recipes.schemas import bounded, objections
from pydantic import BaseModel, field_validator

DDL = """
CREATE TABLE artist (id INTEGER PRIMARY KEY, name TEXT NOT NULL, born DATE);
CREATE TABLE album (id INTEGER PRIMARY KEY, title TEXT, year INTEGER, "order" INTEGER,
  artist_id INTEGER REFERENCES artist (id));
"""


class Scripted:
    """Answers in order, whatever is asked; remembers what was."""

    def __init__(self, *answers, finish="stop"):
        self.answers = list(answers)
        self.finish = finish
        self.asked = []

    def chat(self, talks, params):
        if isinstance(params, SamplingParams):  # as AsyncLLM
            return self._stream(talks, params)
        return [self._next(talk, wish) for talk, wish in zip(talks, params, strict=True)]

    async def _stream(self, talk, params):
        yield self._next(talk, params)

    def _next(self, talk, params):
        self.asked.append((talk, params))
        text = self.answers.pop(0)
        said = SimpleNamespace(text=text, message=None, finish_reason=self.finish)
        return SimpleNamespace(outputs=[said], error=None)


def js(**fields):
    return json.dumps(fields)


def test_classification_asks_under_its_labels():
    llm = Scripted(js(label="b"))
    (result,) = run(llm, Classification(labels=("a", "b")), ["text"])
    assert result.valid and result.value == {"label": "b"} and result.repairs == 0
    ((talk, params),) = llm.asked
    assert params.so_args.rule["properties"]["label"]["enum"] == ["a", "b"]
    assert "text" in talk[-1]["content"] and params.temperature == 0.0 and params.max_tokens is None


def test_several_labels_come_in_their_own_order():
    llm = Scripted(js(b=True, a=True, c=False))
    (result,) = run(llm, Classification(labels=("a", "b", "c"), multiple=True), ["text"])
    assert result.value == {"labels": ["a", "b"]}


def test_what_is_wrong_is_asked_again_and_told():
    class Even(BaseModel):
        n: int

    recipe = Classification(
        fields={**Even.model_json_schema(), "properties": {"n": {"maximum": 3}}}
    )
    llm = Scripted(js(n=9), js(n=2))
    (result,) = run(llm, recipe, ["text"])
    assert result.value == {"n": 2} and result.valid and result.repairs == 1
    assert result.steps[0].problems and not result.steps[1].problems
    again = llm.asked[1][0]
    assert again[-2] == {"role": "assistant", "content": js(n=9)}
    assert result.steps[0].problems[0] in again[-1]["content"]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_repairs_are_bounded_and_what_is_left_is_said(most):
    recipe = Classification(fields={"type": "object", "properties": {"n": {"maximum": 3}}})
    llm = Scripted(*[js(n=9)] * 9)
    (result,) = run(llm, recipe, ["text"], max_repairs=most)
    assert len(llm.asked) == 1 + most and result.repairs == most
    assert not result.valid and "9" in result.problems[0] and result.value == {"n": 9}


def test_a_cut_answer_is_a_problem_and_no_value():
    (result,) = run(
        Scripted(js(label="a"), finish="length"),
        Classification(labels=("a",)),
        "text",
        max_repairs=0,
    )
    assert result.value is None and "length" in result.problems[0]


def test_texts_are_worked_on_at_once():
    llm = Scripted(js(label="a"), js(label="b"), js(label="a"))
    results = run(llm, Classification(labels=("a", "b")), ["x", "y", "z"])
    assert [r.value["label"] for r in results] == ["a", "b", "a"]


def test_an_event_loop_does_the_same():
    recipe = NamedEntities(chunk_words=3)
    answers = [js(entities=[{"text": "Ada", "type": "person"}]), js(entities=[])]
    on_loop = asyncio.run(arun(Scripted(*answers), recipe, "Ada went home. Then she slept."))
    (plain,) = run(Scripted(*answers), recipe, ["Ada went home. Then she slept."])
    assert on_loop == plain and plain.value[0]["text"] == "Ada"


@pytest.mark.parametrize("wish", [{"n": 2}, {"so_args": {"schema_type": "regex", "schema": "a"}}])
def test_what_the_recipe_sets_may_not_be_given(wish):
    with pytest.raises(InvalidRequestError, match=next(iter(wish))):
        run(
            Scripted(), Classification(labels=("a",)), ["x"], sampling_params=SamplingParams(**wish)
        )


@pytest.mark.parametrize("more", [{}, {"dialect": "sqlite"}])
def test_sql_without_its_extra_says_what_to_install(monkeypatch, more):
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    with pytest.raises(UnsupportedError, match=r"sqlglot.*deepinfer-core\[recipes\]"):
        SQLGeneration(ddl=DDL, **more)


def test_entities_are_placed_in_the_order_of_the_text():
    text = "Ada met Bob. Bob met Ada in Rome."
    said = [("Ada", "person"), ("Bob", "person"), ("Bob", "person"), ("Rome", "location")]
    answer = js(entities=[{"text": t, "type": k} for t, k in said])
    (result,) = run(Scripted(answer), NamedEntities(), [text])
    assert [(e["text"], e["start"]) for e in result.value] == [
        ("Ada", 0),
        ("Bob", 8),
        ("Bob", 13),
        ("Rome", 28),
    ]
    assert all(text[e["start"] : e["end"]] == e["text"] for e in result.value)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("SELECT name FROM artist WHERE id > 3", None),
        ("SELECT a.title FROM album AS a JOIN artist AS b ON a.artist_id = b.id", None),
        ("WITH t AS (SELECT id FROM artist) SELECT id FROM t", None),
        ("SELECT count(*) FROM ARTIST", None),
        ("(SELECT id FROM artist)", None),
        ("SELECT nothing FROM artist", "nothing"),
        ("SELECT * FROM nowhere", "nowhere"),
        ("SELECT id FROM artist WHERE id IN (SELECT song FROM album)", "song"),
        ("DROP TABLE artist", "DROP"),
        ("INSERT INTO artist (id) VALUES (1)", "INSERT"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("SELECT FROM WHERE", "no sqlite SQL"),
        ("SELECT", "selects nothing"),
        ("", "0 statements"),
        ("WITH t AS (DELETE FROM artist RETURNING id) SELECT id FROM t", "DELETE"),
        ("WITH t AS (INSERT INTO artist (id) VALUES (1) RETURNING id) SELECT id FROM t", "INSERT"),
        ("WITH t AS (UPDATE artist SET id = 1 RETURNING id) SELECT id FROM t", "UPDATE"),
        ("SELECT id INTO artist FROM artist", "INTO"),
        (f"SELECT id FROM artist WHERE id = {'(' * 3000}1{')' * 3000}", "too deep"),
    ],
)
def test_queries_are_checked_against_the_database(query, problem):
    found = SQLGeneration(ddl=DDL).check_query(query)
    assert (found == []) if problem is None else problem in found[0]


READS = [
    ("sqlite", "SELECT id FROM main.artist", "no table main.artist"),
    ("sqlite", "SELECT id FROM other.artist", "no table other.artist"),
    ("sqlite", "SELECT id FROM a.b.artist", "no table a.b.artist"),
    ("sqlite", "SELECT x.id FROM artist JOIN other.album AS x ON x.id = artist.id", "other.album"),
    ("sqlite", "WITH t AS (SELECT 1 AS y) SELECT y FROM other.t", "other.t"),
    ("sqlite", "SELECT 1 FROM (WITH t AS (SELECT 1) SELECT * FROM t) JOIN t", "no table t"),
    ("sqlite", "SELECT name FROM sqlite_master", "sqlite_master"),
    ("sqlite", "SELECT name FROM pragma_table_info('artist')", "pragma_table_info"),
    ("duckdb", "SELECT 1 FROM '/etc/passwd'", "/etc/passwd"),
    ("duckdb", "SELECT 1 FROM read_csv('/etc/passwd')", "read_csv"),
    ("postgres", "SELECT 1 FROM generate_series(1, 9999999999)", "generate_series"),
    ("postgres", "SELECT id FROM artist, LATERAL pg_sleep(1)", "pg_sleep"),
    ("snowflake", "SELECT * FROM @stage", "stage"),
    ("sqlite", "SELECT load_extension('x')", "calls load_extension"),
    ("sqlite", "SELECT id FROM artist WHERE writefile('a', name) > 0", "calls writefile"),
    ("sqlite", "SELECT id FROM artist ORDER BY edit(name)", "calls edit"),
    ("sqlite", "SELECT id FROM artist WHERE id IN (SELECT readfile('x'))", "calls readfile"),
    ("postgres", "SELECT nextval('s')", "calls nextval"),
    ("postgres", "SELECT pg_catalog.pg_sleep(1)", "calls pg_catalog.pg_sleep"),
    ("postgres", "SELECT mine.lower(name) FROM artist", "calls mine.lower"),
    ("postgres", "SELECT set_config('a', 'b', FALSE), pg_read_file('x')", "pg_read_file"),
    ("mysql", "SELECT SLEEP(3)", "calls sleep"),
    ("mysql", "SELECT @a := 1", "PARAMETER"),
    ("mysql", "SELECT @@version", "SESSIONPARAMETER"),
    ("tsql", "SELECT NEXT VALUE FOR s", "next_value_for"),
    ("tsql", "EXEC xp_cmdshell 'dir'", "It is no "),
    ("oracle", "SELECT utl_http.request('x') FROM artist", "calls utl_http.request"),
    ("postgres", "SELECT id FROM artist FOR UPDATE", "LOCK"),
    ("sqlite", "PRAGMA table_info(artist)", "PRAGMA"),
    ("sqlite", "ATTACH 'x' AS y", "It is no "),
    ("sqlite", "VALUES (1)", "VALUES"),
]


@pytest.mark.parametrize(("dialect", "query", "problem"), READS)
def test_a_query_does_nothing_but_read_what_the_ddl_has(dialect, query, problem):
    found = SQLGeneration(ddl=DDL, dialect=dialect).check_query(query)
    assert found and problem in found[0]


COMPUTES = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5) SELECT i FROM n
SELECT id FROM artist UNION SELECT id FROM album ORDER BY id LIMIT 3
SELECT COUNT(DISTINCT year), SUM(year), AVG(year), MIN(year), MAX(title), TOTAL(year) FROM album
SELECT GROUP_CONCAT(title, ', '), COUNT(*) FILTER (WHERE year > 1990) FROM album GROUP BY year
SELECT strftime('%Y', born), date(born, '+1 day'), julianday(born), datetime('now') FROM artist
SELECT UPPER(name) || '!', SUBSTR(name, 1, 2), INSTR(name, 'a'), REPLACE(name, 'a', 'b') FROM artist
SELECT TRIM(name), LENGTH(name), printf('%d', id), typeof(id), quote(name), hex(name) FROM artist
SELECT CASE WHEN year > 2000 THEN 1 ELSE 0 END, IIF(year, 1, 2), COALESCE(year, 0) FROM album
SELECT CAST(year AS TEXT), ROUND(year / 3.0, 1), ABS(year), year % 10, NULLIF(year, 0) FROM album
SELECT title, RANK() OVER (PARTITION BY year ORDER BY id), LAG(year) OVER (ORDER BY id) FROM album
SELECT title FROM album WHERE year BETWEEN 1 AND 2 AND title LIKE 'a%' AND NOT title GLOB '*b'
SELECT id FROM artist WHERE EXISTS (SELECT 1 FROM album WHERE album.artist_id = artist.id)
SELECT json_extract(name, '$.a'), name ->> '$.b', random(), MAX(id, 3), CURRENT_DATE FROM artist
"""


@pytest.mark.parametrize("query", COMPUTES.strip().splitlines())
def test_what_only_computes_is_let_through(query):
    """All of these run in SQLite, the judge that they are queries."""
    database = sqlite3.connect(":memory:")
    database.executescript(DDL)
    database.execute(query)
    assert SQLGeneration(ddl=DDL).check_query(query) == []


def test_functions_of_ones_own_are_allowed_by_name():
    query = "SELECT Distance(name), cost(id) FROM artist"
    assert "distance" in SQLGeneration(ddl=DDL, functions=("cost",)).check_query(query)[0]
    assert SQLGeneration(ddl=DDL, functions=("cost", "distance")).check_query(query) == []


def test_a_schema_of_the_ddl_may_be_named_and_is_written():
    ddl = 'CREATE TABLE shop.sales.item (id INT, name TEXT); CREATE TABLE "my s".item2 (id INT);'
    recipe = SQLGeneration(ddl=ddl, dialect="postgres")
    good = ["item", "sales.item", "Shop.sales.ITEM", '"my s".item2', "item2"]
    bad = ["shop.item", "shop.item2", "x.shop.sales.item", "sales.item2", "other.sales.item"]
    for source in good:
        assert recipe.check_query(f"SELECT id FROM {source}") == [], source
    for source in bad:
        assert f"no table {source}; " in recipe.check_query(f"SELECT id FROM {source}")[0]
    (ask,) = recipe.parts("q")
    assert "FROM shop.sales.item" in ask.so_args["schema"]
    assert 'FROM \\"my s\\".item2' in ask.so_args["schema"]
    queries = [turn["content"] for turn in ask.messages if turn["role"] == "assistant"]
    assert queries and all(recipe.check_query(query) == [] for query in queries)


def test_a_table_twice_is_refused():
    ddl = "CREATE TABLE a.t (id INT); CREATE TABLE b.T (name TEXT)"
    with pytest.raises(InvalidRequestError, match="the table T twice"):
        SQLGeneration(ddl=ddl).database()


class Branch(BaseModel):
    """A type that holds itself: its schema is a reference."""

    name: str
    branches: "list[Branch]" = []


@pytest.mark.parametrize("text", ["", " \n "])
def test_an_empty_text_has_a_value_of_the_recipes_kind(text):
    (found,) = run(Scripted(), NamedEntities(), [text])
    assert (found.value, found.valid, found.steps) == ([], True, ())
    (found,) = run(Scripted(js(name="", branches=[])), Transformation(target=Branch), [text])
    assert (found.value, found.valid) == ({"name": "", "branches": []}, True)


def test_a_type_that_holds_itself_is_a_type():
    answer = {"name": "a", "branches": [{"name": "b", "branches": []}]}
    (found,) = run(Scripted(js(**answer)), Transformation(target=Branch), ["a b"])
    assert (found.value, found.valid) == (answer, True)
    (found,) = run(Scripted(*[js(name=1)] * 6), Transformation(target=Branch), ["a"])
    assert not found.valid


@pytest.mark.parametrize("text", [None, 5, b"a", ["a"]])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InvalidRequestError, match="works on a text"):
        run(Scripted(), Classification(labels=("a",)), [text])


def test_a_database_that_is_nested_too_deep_is_refused():
    with pytest.raises(InvalidRequestError, match="too deep"):
        SQLGeneration(ddl=f"CREATE TABLE t (a INT CHECK {'(' * 3000}a{')' * 3000})").database()


@pytest.mark.parametrize("queries", ["subset", "any"])
def test_the_examples_of_a_database_are_queries_that_it_knows(queries):
    recipe = SQLGeneration(ddl=DDL, queries=queries)
    (ask,) = recipe.parts("q")
    said = [turn["content"] for turn in ask.messages if turn["role"] == "assistant"]
    shown = said if queries == "subset" else [json.loads(text)["sql"] for text in said]
    assert len(shown) >= 4 and all(recipe.check_query(query) == [] for query in shown)


@pytest.mark.parametrize(
    ("recipe", "answer"),
    [
        (Classification(labels=("a", "b"), examples=(("t", {"label": "b"}),)), js(label="b")),
        (NamedEntities(examples=(("Al", (("Al", "person"),)),)), "Al"),
        (SQLGeneration(ddl=DDL, examples=(("t", "SELECT 1"),)), "SELECT 1"),
    ],
)
def test_examples_stand_before_the_question(recipe, answer):
    (ask,) = recipe.parts("the text")
    assert [turn["role"] for turn in ask.messages] == ["system", "user", "assistant", "user"]
    assert answer in ask.messages[2]["content"] and "the text" in ask.messages[3]["content"]


def test_a_free_query_is_repaired():
    llm = Scripted(js(sql="SELECT x FROM artist"), js(sql="SELECT name FROM artist"))
    (result,) = run(llm, SQLGeneration(ddl=DDL, queries="any"), ["Which names?"])
    assert result.value == "SELECT name FROM artist" and result.valid and result.repairs == 1


class Person(BaseModel):
    name: str
    age: int | None = None


class Report(BaseModel):
    title: str
    people: list[Person] = []
    mood: Literal["good", "bad"]


@dataclass
class Point:
    x: int
    y: int


def test_types_become_schemas():
    for target in (Report, Point, Point.__name__ and Report.model_json_schema()):
        (ask,) = Transformation(target=target).parts("text")
        assert ask.so_args["schema"]["type"] == "object"


def test_a_short_document_is_asked_about_once_under_the_whole_type():
    answer = js(title="T", people=[{"name": "Ada", "age": None}], mood="good")
    llm = Scripted(answer)
    (result,) = run(llm, Transformation(target=Report), ["short"])
    assert result.valid and result.value == json.loads(answer) and len(llm.asked) == 1


def test_pieces_are_merged_and_what_is_missing_is_asked_for():
    ada, bob = {"name": "Ada", "age": 3}, {"name": "Bob", "age": None}
    llm = Scripted(
        js(title=None, people=[ada], mood=None),
        js(title="T", people=[ada, bob], mood=None),
        js(title="T", people=[ada, bob], mood="bad"),
    )
    (result,) = run(llm, Transformation(target=Report, chunk_words=2), ["one two. three four."])
    assert result.valid and result.value == {"title": "T", "people": [ada, bob], "mood": "bad"}
    notes = llm.asked[2][0][-1]["content"]
    assert "Bob" in notes and llm.asked[2][1].so_args.rule["required"] == ["title", "mood"]


def test_pieces_that_say_it_all_need_no_further_question():
    llm = Scripted(js(title="T", people=[], mood=None), js(title=None, people=[], mood="bad"))
    (result,) = run(llm, Transformation(target=Report, chunk_words=2), ["one two. three four."])
    assert result.valid and result.value == {"title": "T", "people": [], "mood": "bad"}


def test_bounds_narrow_and_never_widen():
    free = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 40},
            "c": {"$ref": "#/$defs/t"},
            "d": {"type": "string", "maxLength": 7},
        },
        "$defs": {"t": {"anyOf": [{"type": "string", "minLength": 500}, {"type": "null"}]}},
    }
    narrow = bounded(free, 200, 16)
    fields = narrow["properties"]
    assert fields["a"]["maxLength"] == 200 and fields["d"]["maxLength"] == 7
    assert fields["b"]["maxItems"] == 40 and fields["b"]["items"]["maxLength"] == 200
    assert narrow["$defs"]["t"]["anyOf"][0]["maxLength"] == 500
    assert not objections({"a": "x"}, narrow)


class Strict(BaseModel):
    a: str

    @field_validator("a")
    @classmethod
    def _never(cls, value):
        return value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Classification(), "labels or fields"),
        (lambda: Classification(labels=("a", "a")), "twice"),
        (lambda: Classification(labels=("a",), fields=Strict), "not both"),
        (lambda: Classification(labels=("a",), colour="red"), "colour"),
        (lambda: NamedEntities(types=()), "types"),
        (lambda: NamedEntities(max_words=0), "max_words"),
        (lambda: SQLGeneration(ddl=DDL, dialect="klingon"), "klingon"),
        (lambda: SQLGeneration(), "ddl"),
        (lambda: SQLGeneration(ddl="CREATE TABLE (").parts("q"), "ddl"),
        (lambda: SQLGeneration(ddl="SELECT 1").parts("q"), "no table"),
        (lambda: Transformation(target={"type": "array"}), "target"),
        (lambda: Transformation(target=len), "target"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(make, words):
    with pytest.raises(InvalidRequestError, match=words):
        make()
