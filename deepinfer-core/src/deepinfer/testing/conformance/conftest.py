"""Fixtures and reporting of the kit; its options are in ``plugin.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.testing.conformance.kit import Kit
from deepinfer.testing.conformance.session import DECLINED, KIT, TALLY, kit_of


@pytest.fixture(scope="session")
def kit(pytestconfig: pytest.Config) -> Iterator[Kit]:
    """The backend under examination; skips the test if its probe says that it cannot run here."""
    made = kit_of(pytestconfig)
    if made.availability.state != "usable":
        pytestconfig.stash[TALLY].absent = made.availability.reason
        pytest.skip(f"it cannot run here: {made.availability.reason}")
    yield made
    if "device" in vars(made):
        made.device.close()


@pytest.fixture(scope="session")
def anywhere(pytestconfig: pytest.Config) -> Kit:
    """The same, also where the backend cannot run: for what is tested without its device."""
    return kit_of(pytestconfig)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``dtype`` runs over the activation types that the backend names."""
    kit = kit_of(metafunc.config)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", kit.dtypes)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Count what passed, failed and was declined."""
    outcome = yield
    report, tally = outcome.get_result(), item.config.stash.get(TALLY, None)  # type: ignore[attr-defined]
    if tally is None:
        return
    if report.failed:
        tally.failed.append(report.nodeid.rpartition("/")[2])
    elif report.when == "call" and report.passed:
        tally.passed += 1
        tally.invariant |= item.name.startswith("test_batch_invariant_engine")
    elif report.skipped and isinstance(report.longrepr, tuple):
        _, mark, what = str(report.longrepr[2]).partition(DECLINED)
        tally.declined += [what] if mark else []


def pytest_collection_finish(session: pytest.Session) -> None:
    """A run of some tests is no judgement of the whole."""
    tally = session.config.stash.get(TALLY, None)
    if tally is not None:
        here = Path(__file__).parent
        ran = {item.path for item in session.items}
        tally.selected = tally.deselected or not ran.issuperset(here.glob("test_*.py"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Left out by ``-k`` or ``-m``."""
    for item in items[:1]:
        if TALLY in item.config.stash:
            item.config.stash[TALLY].deselected = True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The level, as the last words before pytest's own."""
    if KIT not in config.stash:
        return
    kit, tally = config.stash[KIT], config.stash[TALLY]
    terminalreporter.section("DeepInfer conformance")
    terminalreporter.line(tally.line(kit.name))
    if path := config.getoption("--badge", None):
        tally.write(path, kit.name, str(kit.offer.plugin))
