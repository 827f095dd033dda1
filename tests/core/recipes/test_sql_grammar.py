"""Every text of the SQL grammar runs on a database of these tables."""

import random
import sqlite3

import pytest
from deepinfer.recipes import SQLGeneration

pytest.importorskip("xgrammar")
from walks import compiled, walk

DDL = """
CREATE TABLE artist (id INTEGER PRIMARY KEY, name TEXT NOT NULL, born DATE, photo BLOB);
CREATE TABLE album (id INTEGER PRIMARY KEY, title TEXT, year INTEGER, "order" INTEGER,
  "a b" REAL, artist_id INTEGER REFERENCES artist (id));
CREATE TABLE employee (id INTEGER, boss INTEGER, "group" TEXT,
  FOREIGN KEY (boss) REFERENCES employee (id));
"""
LETTERS = [chr(c) for c in range(32, 127)]


@pytest.fixture(scope="module")
def grammar():
    (ask,) = SQLGeneration(ddl=DDL).parts("q")
    return compiled(ask.so_args["schema"], LETTERS)


@pytest.mark.parametrize("seed", range(60))
def test_a_random_query_runs_and_is_found_valid(grammar, seed):
    query = walk(grammar, LETTERS, random.Random(seed))
    database = sqlite3.connect(":memory:")
    database.executescript(DDL)
    database.execute(query).fetchall()
    assert SQLGeneration(ddl=DDL).check_query(query) == [], query
