"""The plugin's window, in a fresh interpreter: it changes nothing in its host and loads little."""

from __future__ import annotations

import time

import pytest

from deepinfer.cli.hygiene import Report, examine
from deepinfer.testing.conformance.kit import Kit


@pytest.fixture(scope="module")
def report(anywhere: Kit) -> Report:
    """What came of importing it alone."""
    return examine(anywhere.offer.plugin)


def test_the_window_opens(report: Report) -> None:
    """It imports, and its hooks are hooks."""
    assert not report.failure, f"{report.failure}\n{report.trace}"


def test_the_window_touches_nothing(report: Report) -> None:
    """No environment variable, signal handler, logging, start method, path; no heavy import."""
    assert not report.touched, "; ".join(report.touched)


def test_the_window_opens_quickly(report: Report) -> None:
    """It is imported on every machine where the plugin is installed, chosen or not."""
    assert report.seconds < 1.0, f"{report.seconds:.2f} s"


def test_the_probe_answers(report: Report, anywhere: Kit) -> None:
    """None or one sentence; it neither raises nor hangs."""
    mine = [s for s in report.specs if (s.kind, s.name) == ("backend", anywhere.name)]
    assert len(mine) == 1
    assert mine[0].state in ("usable", "unusable"), f"{mine[0].reason}\n{mine[0].trace}"


def test_the_probe_is_quick_and_steady(anywhere: Kit) -> None:
    """It is asked at every start: half a second at most, and the same answer twice."""
    start = time.perf_counter()
    first = anywhere.offer.spec.probe()
    seconds = time.perf_counter() - start
    assert first is None or (isinstance(first, str) and first.strip())
    assert first == anywhere.offer.spec.probe()
    assert seconds < 0.5, f"{seconds:.2f} s"
