"""Comparisons with other people's code: only collected by ``-m oracle``, see the nox session.

``report`` collects one line a comparison; the table stands at the end of the run.
"""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "core" / "models" / "deepseek_v41")]

LINES = pytest.StashKey[list]()


def pytest_ignore_collect(collection_path, config):
    return None if config.option.markexpr == "oracle" else True


def pytest_configure(config):
    config.stash[LINES] = []


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[LINES]:
        terminalreporter.section("largest differences from independent implementations")
        for line in config.stash[LINES]:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def report(pytestconfig):
    """``report(what, value…)``: floats are written short."""

    def add(*cells):
        short = (f"{c:.1e}" if isinstance(c, float) else str(c) for c in cells)
        pytestconfig.stash[LINES].append("  ".join(short))

    return add


@pytest.fixture(scope="session", params=["a", "b", "c"])
def pair(request):
    """A golden configuration, and the other implementation's model of the same checkpoint."""
    from automodel_peer import Peer
    from v41_harness import Golden

    folder = TESTS / "data" / "deepseek-v41" / request.param
    if not folder.is_dir():
        given = request.config.getoption("--golden")
        if given is None:
            pytest.skip(f"configuration {request.param} needs --golden PATH")
        folder = Path(given) / request.param
    return Golden(folder), Peer(folder)
