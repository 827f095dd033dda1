"""The kit on the sample backend's faulty twins: each planted fault fails a test that names it.

Each run is a pytest of its own, as a plugin author starts it. The whole kit on ``reference``,
``cpu`` and ``sample`` is run by ``nox -s plugins``; here are the faults and the reporting.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import pytest

SAMPLE = Path(__file__).parent / "deepinfer-backend-sample"


class Outcome(NamedTuple):
    """A run's exit code, failed test ids, and all that it printed."""

    code: int
    failed: set[str]
    text: str


@pytest.fixture(scope="session")
def search_path(tmp_path_factory) -> str:
    """Where the sample lies: the environment, or a folder that pip installs it into."""
    try:
        version("deepinfer-backend-sample")
        return ""
    except PackageNotFoundError:
        target = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(target), str(SAMPLE)], check=True)
    return str(target)


@pytest.fixture
def kit(search_path, tmp_path):
    """``kit(backend, *arguments)`` runs the kit in a process of its own, outside the checkout."""

    path = os.pathsep.join(filter(None, [search_path, os.environ.get("PYTHONPATH")]))

    def run(backend: str, *arguments: str) -> Outcome:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        command += ["--pyargs", "deepinfer.testing.conformance", "--backend", backend]
        done = subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        text = done.stdout + done.stderr
        return Outcome(done.returncode, set(re.findall(r"^FAILED \S+::(\S+)", text, re.M)), text)

    return run


FAULTS = {
    "sample-wrong-tie": (
        "gumbel_argmax or greedy or test_sampling",
        {"test_op_matches_reference[gumbel_argmax-ties]", "test_greedy_takes_the_lowest_of_equals"},
    ),
    "sample-neighbour": (
        "independent",
        {"test_rows_are_independent[rms_norm-float32]"},
    ),
    "sample-spill": (
        "test_paging",
        {"test_kv_write_touches_nothing_else[float32-one_row]"},
    ),
    "sample-leak": (
        "leak or thread or test_paging",
        {"test_no_page_leaks[float32]"},
    ),
    "sample-deaf": (
        "window or softcap or sink",
        {"test_op_matches_reference[attention-window_decode-float32]"},
    ),
}
WORDS = {
    "sample-wrong-tie": ("gumbel_argmax", "greedy"),
    "sample-neighbour": ("rms_norm", "_block", "decoder_layers", "hyper_open"),  # they norm
    "sample-spill": ("kv_write",),
    "sample-leak": ("leak",),
    "sample-deaf": ("window",),
}


@pytest.mark.parametrize("backend", FAULTS)
def test_a_planted_fault_fails_by_name(kit, backend):
    """What is wrong fails; nothing else does."""
    chosen, expected = FAULTS[backend]
    outcome = kit(backend, "-k", chosen, "--dtype", "float32")
    assert outcome.code == 1, outcome.text
    assert expected <= outcome.failed, outcome.text
    others = {t for t in outcome.failed if not any(word in t for word in WORDS[backend])}
    assert not others
    assert f"conformance: backend {backend}, API 1.0, level failed" in outcome.text


def test_the_sound_twin_passes_where_the_faulty_fail(kit):
    """The same choice of tests on the sample itself, so that it is the fault that was seen."""
    chosen = " or ".join(f"({words})" for words, _ in FAULTS.values())
    outcome = kit("sample", "-k", chosen, "--dtype", "float32")
    assert outcome.code == 0, outcome.text
    assert "level not judged (only some tests were run)" in outcome.text


def test_a_declined_argument_is_partial(kit, tmp_path):
    """It is skipped by name; the level says so, and the badge file too."""
    badge = tmp_path / "badge.json"
    outcome = kit("sample-modest", "-k", "silu_mul", "--badge", str(badge))
    assert outcome.code == 0, outcome.text
    assert "declines silu_mul(limit)" in outcome.text
    told = json.loads(badge.read_text())
    assert told["backend"] == "sample-modest" and told["api"] == [1, 0]
    assert set(told["declined"]) == {"silu_mul(limit)"} and told["deselected"]


def test_a_backend_that_cannot_run_here_is_skipped_with_its_reason(kit):
    """Hygiene and probe are examined; all else waits for a machine that has the device."""
    outcome = kit("sample-absent", "-rs")
    assert outcome.code == 0, outcome.text
    assert "not judged (it cannot run here: its device is not in this machine)" in outcome.text
    assert "passed" in outcome.text and "skipped" in outcome.text


def test_an_unknown_backend_is_a_usage_error(kit):
    """The known names are listed."""
    outcome = kit("sampel")
    assert outcome.code == 4, outcome.text
    assert "'sampel'" in outcome.text and "reference" in outcome.text


def test_the_options_exist_only_for_the_kit(tmp_path):
    """An ordinary pytest run in the same environment does not know ``--backend``."""
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--backend", "x", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 4 and "unrecognized arguments" in done.stderr
