"""What one run of the kit shares: the chosen backend and the tally of results."""

from __future__ import annotations

import pytest

from deepinfer.testing.conformance.kit import Kit
from deepinfer.testing.conformance.level import Tally

KIT = pytest.StashKey[Kit]()
TALLY = pytest.StashKey[Tally]()
DECLINED = "declines "
"""How the reason of a skip begins when a backend declined an optional argument."""


def open_session(config: pytest.Config) -> None:
    """Find the backend that the command line names; a usage error if there is none."""
    name = config.getoption("--backend")
    if not name:
        raise pytest.UsageError("say which backend: --backend NAME")
    try:
        kit = Kit(name, config.getoption("--device"), config.getoption("--dtype") or ())
    except LookupError as why:
        raise pytest.UsageError(str(why)) from None
    config.stash[KIT], config.stash[TALLY] = kit, Tally()


def kit_of(config: pytest.Config) -> Kit:
    """The run's kit."""
    if KIT not in config.stash:
        raise pytest.UsageError(
            "run the kit as: pytest --pyargs deepinfer.testing.conformance --backend NAME"
        )
    return config.stash[KIT]
