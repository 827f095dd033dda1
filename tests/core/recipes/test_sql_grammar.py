"""Every text of the SQL grammar runs on a database of these tables."""

import random
import sqlite3

import pytest
from deepinfer.recipes import SQLGeneration

xgrammar = pytest.importorskip("xgrammar")

DDL = """
CREATE TABLE artist (id INTEGER PRIMARY KEY, name TEXT NOT NULL, born DATE, photo BLOB);
CREATE TABLE album (id INTEGER PRIMARY KEY, title TEXT, year INTEGER, "order" INTEGER,
  "a b" REAL, artist_id INTEGER REFERENCES artist (id));
CREATE TABLE employee (id INTEGER, boss INTEGER, "group" TEXT,
  FOREIGN KEY (boss) REFERENCES employee (id));
"""
LETTERS = [chr(c) for c in range(32, 127)]


@pytest.fixture(scope="module")
def compiled():
    vocabulary = xgrammar.TokenizerInfo([*LETTERS, "</s>"], stop_token_ids=[len(LETTERS)])
    (ask,) = SQLGeneration(ddl=DDL).parts("q")
    return xgrammar.GrammarCompiler(vocabulary).compile_grammar(ask.so_args["schema"])


def walk(compiled, rng):
    """A random text, letter by letter; where it may end it does, half the time."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, len(LETTERS) + 1)
    text = ""
    while True:
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [i for i in range(len(LETTERS) + 1) if words[i // 32] >> (i % 32) & 1]
        if len(LETTERS) in allowed and (rng.random() < 0.5 or len(allowed) == 1):
            return text
        token = rng.choice([i for i in allowed if i < len(LETTERS)])
        assert matcher.accept_token(token)
        text += LETTERS[token]


@pytest.mark.parametrize("seed", range(60))
def test_a_random_query_runs_and_is_found_valid(compiled, seed):
    query = walk(compiled, random.Random(seed))
    database = sqlite3.connect(":memory:")
    database.executescript(DDL)
    database.execute(query).fetchall()
    assert SQLGeneration(ddl=DDL).check_query(query) == [], query
