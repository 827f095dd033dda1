"""The example of structured output holds what it says."""

from __future__ import annotations

import importlib.util
import json

import pytest

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("deepinfer_structured") is None, reason="needs the plugin"
    ),
]


def test_all_three_kinds_are_valid(example, monkeypatch, capsys):
    module = example("_structured_output.py")
    monkeypatch.setattr("sys.argv", ["example", "--samples", "2", "--max-tokens", "60"])
    assert module.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("valid") + printed.count("cut off") == 6 and "WRONG" not in printed


def test_the_checks_notice_what_is_wrong(example):
    module = example("_structured_output.py")
    ticket = {"category": "billing", "priority": 9, "summary": "twelve"}
    with pytest.raises(Exception, match="maximum"):
        module.is_ticket(json.dumps(ticket))
    assert not module.is_date("2024-13-01") and module.is_date("2024-12-01")
    assert module.is_sum("1 + (2 - 3)")
    with pytest.raises(SyntaxError):
        module.is_sum("1 + (2")
