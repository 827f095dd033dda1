"""The backend's sources are importable without installing it; its window needs no torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "deepinfer-backend-cuda" / "src"
sys.path.insert(0, str(HERE))  # tensor_core, registry: shared with the scripts of this folder


@pytest.fixture
def sources(monkeypatch):
    monkeypatch.syspath_prepend(str(SOURCES))


@pytest.fixture
def script():
    """Runs a file of this folder in its own process, since Triton's driver is chosen once."""

    def run(name, *arguments, **environment):
        paths = os.pathsep.join(p for p in (str(SOURCES), os.environ.get("PYTHONPATH")) if p)
        done = subprocess.run(
            [sys.executable, str(HERE / name), *arguments],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return run
