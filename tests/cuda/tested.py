"""The Triton that the kernels are written for; beside another one their tests say nothing.

As a program: leaves with 1 if it is another one, or none.
"""

import importlib.metadata
import sys

import pytest

TESTED = "3.6"


def found():
    """The installed version; empty if there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


_HERE = found()
NEEDS_TRITON = pytest.mark.skipif(
    not _HERE.startswith(f"{TESTED}."), reason=f"needs Triton {TESTED}, here is {_HERE or 'none'}"
)

if __name__ == "__main__":
    sys.exit(not _HERE.startswith(f"{TESTED}."))
