"""Native kernel tests: skipped with the reason where the extension was not built or cannot run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from deepinfer import native

REASON = native.available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON is not None:
        for item in items:
            if "core/native" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this machine has."""
    from deepinfer.native import loader

    if loader.set_isa(request.param) != request.param:
        loader.set_isa("avx512")
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    loader.set_isa("avx512")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1234)
