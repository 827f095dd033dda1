"""How much of JSON Schema the compiler of deepinfer-structured enforces, beside plain xgrammar.

    python benchmarks/structured_coverage.py [SUITE] [--json FILE] [--page FILE] [--check]

SUITE is the folder of the JSON Schema Test Suite with ``tests`` and ``remotes``; draft 2020-12 is
run, all files. FILE of ``--json`` takes the numbers, or gives them where there is no SUITE;
``--check`` compares instead of writing. ``--page`` writes ``docs/structured-coverage.md`` from the
numbers and from the cases of ``tests/structured/schema/cases.py``. Fails if an invalid instance is
accepted in a group that is not refused.

An instance counts as accepted if one of its spellings is: its keys in some order, numbers without
an exponent, nothing escaped that needs no escape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "structured" / "schema"))

NUMBERS = ROOT / "benchmarks" / "results" / "structured_coverage.json"
DRAFT = "draft2020-12"
WAYS = ("default", "standard", "xgrammar")
COUNTS = ("groups", "refused", "accepted", "left_out", "rejected", "wrong")
MOST = 400  # spellings of an instance


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suite", type=Path, nargs="?", help="folder with tests and remotes")
    parser.add_argument("--json", type=Path, default=NUMBERS, help="where the numbers go")
    parser.add_argument("--page", type=Path, help="where the document goes")
    parser.add_argument("--check", action="store_true", help="only compare with the numbers there")
    args = parser.parse_args(arguments)
    found = measure(args.suite) if args.suite else json.loads(args.json.read_text("utf-8"))
    if args.check and ours(found) != ours(json.loads(args.json.read_text("utf-8"))):
        raise SystemExit(f"{args.json} is not what the suite comes to: run this without --check")
    if args.suite and not args.check:
        args.json.write_text(json.dumps(found) + "\n", "utf-8")
    if args.page:
        args.page.write_text(page(found), "utf-8")
    wrong = sum(row[way]["wrong"] for row in found["files"].values() for way in WAYS[:2])
    print(json.dumps(total(found)))
    if wrong:
        raise SystemExit(f"{wrong} invalid instances are accepted: {found['wrong']}")


def ours(found: dict[str, Any]) -> dict[str, Any]:
    """The counts of the compiler; xgrammar's own change with its version."""
    files = found.get("files", {}).items()
    return {name: {way: row[way] for way in WAYS[:2]} for name, row in files}


def measure(suite: Path) -> dict[str, Any]:
    """The counts for each file and way, and the invalid instances that were accepted, if any."""
    files: dict[str, Any] = {}
    wrong: list[str] = []
    known = documents(suite)
    folder = suite / "tests" / DRAFT
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        rows = {way: dict.fromkeys(COUNTS, 0) for way in WAYS}
        for group in json.loads(path.read_text("utf-8")):
            for way in WAYS:
                wrong += count(group, way, known, rows[way], name)
        files[name] = rows
    return {"suite": DRAFT, "xgrammar": version("xgrammar"), "files": files, "wrong": wrong}


def count(group: dict, way: str, known: dict, row: dict[str, int], name: str) -> list[str]:
    """Add a group to its row; the invalid instances that the compiler accepted."""
    row["groups"] += 1
    grammar = grammar_of(group["schema"], way, known, asserted="format/" in name)
    if grammar is None:
        row["refused"] += 1
        return []
    wrong = []
    for test in group["tests"]:
        good, found = test["valid"], grammar != "nothing" and accepted(grammar, test["data"])
        row[("left_out", "accepted")[found] if good else ("rejected", "wrong")[found]] += 1
        if found and not good and way != "xgrammar":
            wrong.append(f"{name}: {group['description']}: {test['description']}")
    return wrong


def grammar_of(schema: Any, way: str, known: dict[str, Any], asserted: bool) -> Any:
    """A compiled grammar, None for a refusal, or "nothing" where no value satisfies the schema.

    ``default`` are the settings that users get; ``standard`` leaves objects as open as the standard
    has them, and formats annotations, but where the suite has them ``asserted``.
    """
    from deepinfer_structured.schema import SchemaOptions, UnsupportedSchemaError, compile_schema
    from grammars import INFO, compiled

    if way == "xgrammar":
        return plain(schema, INFO)
    more = {}
    if way == "standard":
        more = {"additional_properties": "allow", "formats": ("annotate", "assert")[asserted]}
    try:
        return compiled(compile_schema(schema, SchemaOptions(documents=known, **more)).ebnf)
    except UnsupportedSchemaError as error:
        return "nothing" if error.unsupported.reason == "no value satisfies it" else None


def plain(schema: Any, info: Any) -> Any:
    """xgrammar's own converter with its usual settings."""
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    try:
        return compiler.compile_json_schema(json.dumps(schema))
    except Exception:  # it has no type of its own for refusals
        return None


def accepted(grammar: Any, value: Any) -> bool:
    """Whether some spelling of a value is of the grammar."""
    from grammars import accepts

    texts = (json.dumps(each, ensure_ascii=False) for each in islice(spellings(value), MOST))
    return any(accepts(grammar, text) for text in texts)


def spellings(value: Any) -> Iterator[Any]:
    """The value with its keys in other orders; integers without a point."""
    if isinstance(value, dict):
        inner = [list(islice(spellings(child), MOST)) for child in value.values()]
        for places in islice(permutations(range(len(value))), MOST):
            keys = [list(value)[place] for place in places]
            for children in islice(product(*(inner[place] for place in places)), MOST):
                yield dict(zip(keys, children, strict=True))
    elif isinstance(value, list):
        yield from map(list, product(*(list(islice(spellings(child), MOST)) for child in value)))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value


def documents(suite: Path) -> dict[str, Any]:
    """What the suite's references lead to: its remotes, and the meta-schema."""
    from jsonschema_specifications import REGISTRY

    remotes = suite / "remotes"
    found = {
        f"http://localhost:1234/{path.relative_to(remotes).as_posix()}": json.loads(
            path.read_text("utf-8")
        )
        for path in sorted(remotes.rglob("*.json"))
    }
    return found | {uri: REGISTRY.contents(uri) for uri in REGISTRY if "2020-12" in uri}


def total(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The sums of all files, by way."""
    rows = found["files"].values()
    return {way: {c: sum(row[way][c] for row in rows) for c in COUNTS} for way in WAYS}


def page(found: dict[str, Any]) -> str:
    """The document: the numbers, and the table of keywords."""
    from cases import CASES

    lines = []
    for name, row in [*found["files"].items(), ("**all**", total(found))]:
        cells = [str(row["default"]["groups"])]
        for way in WAYS:
            counts = row[way]
            valid = counts["accepted"] + counts["left_out"]
            wrong = f"**{counts['wrong']}**" if counts["wrong"] else "0"
            cells += [str(counts["refused"]), f"{counts['accepted']}/{valid}", wrong]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    words = []
    for case in CASES:
        note = f"{case.note}; instead: {case.instead}" if case.instead else case.note
        cells = (f"`{case.keyword}`", case.status, note)
        words.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    text = (ROOT / "benchmarks" / "structured_coverage.template.md").read_text("utf-8")
    text = text.replace("{{xgrammar}}", found["xgrammar"])
    return text.replace("{{numbers}}", "\n".join(lines)).replace("{{keywords}}", "\n".join(words))


if __name__ == "__main__":
    main()
