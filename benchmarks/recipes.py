"""What recipes get right: validity and quality of each on 30 texts, for a model.

``python benchmarks/recipes.py --prompts FOLDER --json benchmarks/results/recipes.json``. FOLDER has
jsonl files of public prompts, an object a line with ``turns`` (gsm8k, humaneval, mt-bench). Valid
means: a result passes its check, and beside it ``jsonschema`` or SQLite. What is right is told by
rules that need no judge: the file a prompt comes from, the numbers and names written in it, and the
rows that a query returns.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deepinfer import LLM
from deepinfer.recipes import Classification, NamedEntities, SQLGeneration, Transformation, run
from deepinfer.recipes.schemas import objections

COUNT = 30
LABELS = {"gsm8k": "mathematics", "humaneval": "programming", "mt-bench": "other"}
FACTS = {
    "type": "object",
    "properties": {
        "people": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 6},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 1000000},
            "maxItems": 10,
        },
        "question": {"type": "string", "maxLength": 160},
    },
    "required": ["people", "numbers", "question"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with LLM(args.model) as llm:
        found = {
            "classify": classify(llm, args.prompts),
            "ner": entities(llm, args.prompts),
            "transform": transform(llm, args.prompts),
            "sql": sql(llm),
        }
    for name, row in found.items():
        print(name, row)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "recipes": found}, indent=1) + "\n")


def classify(llm: LLM, folder: Path) -> dict[str, Any]:
    """The kind of a prompt, which is the file that it comes from."""
    texts = {name: prompts(folder, name, COUNT // 3) for name in LABELS}
    recipe = Classification(labels=tuple(LABELS.values()))
    asked = [(text, LABELS[name]) for name, some in texts.items() for text in some]
    results = run(llm, recipe, [text for text, _ in asked])
    right = [r.value == {"label": label} for r, (_, label) in zip(results, asked, strict=True)]
    return summary(results) | {"right label": share(right)}


def entities(llm: LLM, folder: Path) -> dict[str, Any]:
    """Names of people, against words with a capital that also occur inside a sentence."""
    texts = problems(folder)
    results = run(llm, NamedEntities(types=("person", "place", "organization")), texts)
    said = [{e["text"] for e in r.value or () if e["type"] == "person"} for r in results]
    return summary(results) | overlap(said, [names(text) for text in texts], "person")


def transform(llm: LLM, folder: Path) -> dict[str, Any]:
    """Numbers of a problem, against those written in it in digits."""
    texts = problems(folder)
    results = run(llm, Transformation(target=FACTS), texts)
    valid = [r.valid and not objections(r.value, FACTS) for r in results]
    said = [{str(n) for n in (r.value or {}).get("numbers", ())} for r in results]
    gold = [set(re.findall(r"(?<![\d.])\d+(?![\d.]*\d)", text)) for text in texts]
    return summary(results) | {"valid": share(valid)} | overlap(said, gold, "number")


def sql(llm: LLM) -> dict[str, Any]:
    """Rows of the query against rows of the recorded one."""
    data = json.loads(Path(__file__).with_name("recipes_sql.json").read_text())
    database = sqlite3.connect(":memory:")
    database.executescript(data["ddl"])
    for table, rows in data["rows"].items():
        marks = ",".join("?" * len(rows[0]))
        database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    questions = data["questions"][:COUNT]
    recipe = SQLGeneration(ddl=data["ddl"])
    results = run(llm, recipe, [question for question, _ in questions])
    ran = [rows_of(database, r.value) for r in results]
    gold = [rows_of(database, query) for _, query in questions]
    right = [a is not None and a == b for a, b in zip(ran, gold, strict=True)]
    valid = [r.valid and rows is not None for r, rows in zip(results, ran, strict=True)]
    return summary(results) | {"valid": share(valid), "right rows": share(right)}


def rows_of(database: sqlite3.Connection, query: str | None) -> list[str] | None:
    """What a query returns, in no order; None if it does not run."""
    try:
        return sorted(map(repr, database.execute(query or "").fetchall())) if query else None
    except sqlite3.Error:
        return None


def prompts(folder: Path, name: str, count: int) -> list[str]:
    """The first prompts of a file that fit."""
    lines = (folder / f"{name}.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["turns"][0] for line in lines]
    return [text for text in texts if len(text.split()) < 300][:count]


def problems(folder: Path) -> list[str]:
    """Word problems without the line that says how to answer."""
    return [text.partition("\nPlease reason")[0] for text in prompts(folder, "gsm8k", COUNT)]


def names(text: str) -> set[str]:
    """Words with a capital inside a sentence, months, days and units aside."""
    inside = re.findall(r"(?<=[a-z,] )([A-Z][a-z]+)", text)
    return set(inside) - {
        "I",
        "Monday",
        "Tuesday",
        "Wednesday",
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    }


def summary(results: Iterable[Any]) -> dict[str, Any]:
    every = list(results)
    return {
        "texts": len(every),
        "valid": share([r.valid for r in every]),
        "repairs": sum(r.repairs for r in every),
    }


def overlap(said: list[set[str]], gold: list[set[str]], what: str) -> dict[str, float]:
    """Precision and recall over all texts."""
    both = sum(len(a & b) for a, b in zip(said, gold, strict=True))
    return {
        f"{what} precision": round(both / max(1, sum(map(len, said))), 3),
        f"{what} recall": round(both / max(1, sum(map(len, gold))), 3),
    }


def share(hits: list[bool]) -> float:
    return round(sum(hits) / max(1, len(hits)), 3)


if __name__ == "__main__":
    main()
