"""The coverage script and the document that it writes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUITE = {
    "minimum.json": [
        {
            "description": "a number",
            "schema": {"type": "number", "minimum": 2},
            "tests": [
                {"description": "above", "data": 2.0, "valid": True},
                {"description": "below", "data": 1, "valid": False},
                {"description": "another type", "data": "2", "valid": False},
            ],
        },
        {"description": "none", "schema": False, "tests": [
            {"description": "any", "data": 1, "valid": False}]},
        {"description": "refused", "schema": {"pattern": "(?=a)"}, "tests": [
            {"description": "any", "data": 1, "valid": True}]},
        {
            "description": "keys in another order, a remote reference",
            "schema": {"$ref": "http://localhost:1234/draft2020-12/o.json"},
            "tests": [
                {"description": "both", "data": {"b": [{"d": 1, "c": 2}], "a": 1}, "valid": True},
                {"description": "too many", "data": {"e": 1}, "valid": False},
            ],
        },
    ]
}  # fmt: skip
REMOTE = {
    "properties": {
        "a": {"const": 1},
        "b": {"items": {"properties": {"c": {}, "d": {}}}},
    },
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def script():
    path = ROOT / "benchmarks" / "structured_coverage.py"
    spec = importlib.util.spec_from_file_location("structured_coverage", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def suite(tmp_path):
    for name, groups in SUITE.items():
        folder = tmp_path / "tests" / "draft2020-12"
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps(groups), "utf-8")
    remote = tmp_path / "remotes" / "draft2020-12" / "o.json"
    remote.parent.mkdir(parents=True)
    remote.write_text(json.dumps(REMOTE), "utf-8")
    return tmp_path


def test_counts(script, suite):
    """Refusals, orders of keys and schemas without instances are counted as documented."""
    found = script.measure(suite)["files"]["minimum"]
    expected = {"groups": 4, "refused": 1, "accepted": 2, "left_out": 0, "rejected": 4, "wrong": 0}
    assert found["standard"] == found["default"] == expected


def test_a_wrong_instance_fails(script, suite):
    """It can fail: here the suite says so of a valid instance."""
    path = suite / "tests" / "draft2020-12" / "minimum.json"
    groups = json.loads(path.read_text("utf-8"))
    groups[0]["tests"][0]["valid"] = False
    path.write_text(json.dumps(groups), "utf-8")
    with pytest.raises(SystemExit, match="a number: above"):
        script.main([str(suite), "--json", str(suite / "numbers.json")])
    with pytest.raises(SystemExit, match="is not what the suite comes to"):
        (suite / "numbers.json").write_text("{}", "utf-8")
        script.main([str(suite), "--json", str(suite / "numbers.json"), "--check"])


def test_the_document_is_fresh(script):
    """Written from the numbers there are and from the cases that ``test_keywords.py`` checks."""
    numbers = json.loads(script.NUMBERS.read_text("utf-8"))
    page = ROOT / "docs" / "structured-coverage.md"
    assert page.read_text("utf-8") == script.page(numbers), "run structured_coverage.py --page"


def test_nothing_invalid_is_accepted_in_the_published_numbers(script):
    """Of schemas that are not refused, in both ways of ours."""
    numbers = json.loads(script.NUMBERS.read_text("utf-8"))
    total = script.total(numbers)
    assert numbers["wrong"] == [] and total["default"]["wrong"] == total["standard"]["wrong"] == 0
    assert total["default"]["groups"] > 400
