"""Examples are files, not modules: ``example(path)`` imports one."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example():
    """``example("yoco/yoco_equiv.py")`` -> module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load
