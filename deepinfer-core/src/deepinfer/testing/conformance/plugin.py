"""The kit's command line options, known to pytest by an entry point of deepinfer-core.

pytest reads options before it looks into a package named by ``--pyargs``, so they cannot stand in
the package's conftest. This module is imported in every pytest run of an environment that has
deepinfer-core; it does nothing in those that do not name the kit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

KIT = "deepinfer.testing.conformance"


def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> None:
    """Add the options if this run names the kit, as a package or by its path."""
    if _names_the_kit(args):
        _add_options(parser.getgroup("deepinfer", "DeepInfer conformance kit"))


def pytest_configure(config: pytest.Config) -> None:
    """Find the backend before anything is collected; a wrong name ends the run at once."""
    if _names_the_kit(config.args):
        from deepinfer.testing.conformance.session import open_session

        open_session(config)


def _names_the_kit(args: list[str]) -> bool:
    return any(KIT in arg.replace("/", ".").replace("\\", ".") for arg in args)


def _add_options(group: Any) -> None:
    group.addoption("--backend", metavar="NAME", help="the backend plugin to examine")
    group.addoption(
        "--device", type=int, default=0, metavar="N", help="which of its devices to open (0)"
    )
    group.addoption(
        "--dtype",
        action="append",
        choices=["float32", "bfloat16"],
        help="an activation type to examine; may be repeated (all that the backend names)",
    )
    group.addoption("--badge", metavar="FILE", help="write the level reached there, as JSON")
