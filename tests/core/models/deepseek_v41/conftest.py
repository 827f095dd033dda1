"""Lets these tests import their harness, and loads golden checkpoints once."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

DATA = Path(__file__).parents[3] / "data" / "deepseek-v41"


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors on a shared machine: a second thread would only wait for the first."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def goldens(request):
    """``goldens(name)``: configuration ``a`` of this clone; others lie under ``--golden PATH``."""
    from v41_harness import Golden

    loaded = {}

    def load(name):
        if name not in loaded:
            folder = DATA / name
            if not folder.is_dir():
                given = request.config.getoption("--golden")
                if given is None:
                    pytest.skip(f"configuration {name} needs --golden PATH")
                folder = Path(given) / name
            loaded[name] = Golden(folder)
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def a(goldens):
    """Configuration a."""
    return goldens("a")


@pytest.fixture(scope="session", params=["a", "b", "c"])
def golden(request, goldens):
    """Every configuration that is there."""
    return goldens(request.param)


@pytest.fixture(scope="session")
def pictures():
    """Recorded pictures, patches and rows, an open file."""
    from safetensors import safe_open

    with safe_open(DATA / "images.safetensors", "pt") as file:
        yield file


@pytest.fixture(scope="session")
def vision_config(pictures):
    """The tower's sizes where they were recorded."""
    from deepinfer.models.deepseek_v41.images import VisionConfig

    found = VisionConfig.read({"vision_config": json.loads(pictures.metadata()["vision_config"])})
    assert found is not None
    return found
