"""The fence of house section 5: who may import whom, and who may import torch."""

from __future__ import annotations

import json
import sys

import pytest
from tree import core_files, fresh, imports, room, room_of_module, windows

PLAIN = "settings errors"
HANDS = "ops layers models sampling parallel worker"
DOOR = "config sampling_params structured tokenizer chat plugins resolution api engine entrypoints"

LEAVES = ("testing", "benchmarking")  # rooms that nobody imports, unless by name

# room: (rooms it may import, further rooms inside functions, torch, third parties besides torch)
# torch: "never", "lazy" (inside functions only) or "yes".
TABLE = {
    "__init__": ("", "*", "never", ""),
    "__main__": ("cli", "*", "never", "click"),
    "settings": ("errors", "", "never", ""),
    "errors": ("", "", "never", ""),
    "config": (PLAIN, "", "never", "pydantic"),
    "sampling_params": (f"{PLAIN} structured", "", "never", "pydantic"),
    "structured": (PLAIN, "", "never", "pydantic"),
    "api": ("", "", "never", "pluggy"),
    "builtin": ("__init__ api", "native", "never", ""),
    "discovery": (f"{PLAIN} __init__ api", "", "never", "pluggy importlib_metadata packaging"),
    "choice": (f"{PLAIN} api discovery resolution", "", "never", ""),
    "resolution": (f"{PLAIN} api discovery", "", "never", ""),
    "plugins": (f"{PLAIN} api choice discovery resolution", "", "never", "pluggy"),
    "engine": (f"{PLAIN} api config", "", "never", "numpy"),
    "tokenizer": (f"{PLAIN} api config", "models", "never", "numpy tokenizers"),
    "chat": (f"{PLAIN} api config tokenizer", "models", "never", "jinja2"),
    "entrypoints": (f"{PLAIN} {DOOR}", f"executors {HANDS}", "lazy", "numpy tqdm pydantic"),
    # `deepinfer verify` and `bench` run these two on request; nothing else may.
    "cli": (f"{PLAIN} {DOOR} __init__", "* testing benchmarking", "lazy", "click tqdm numpy"),
    "benchmarking": (f"{PLAIN} {DOOR} __init__", "*", "lazy", "numpy"),
    "recipes": (
        f"{PLAIN} api discovery sampling_params structured",
        "plugins",
        "never",
        "pydantic",
    ),
    "serving": (f"{PLAIN} {DOOR}", "executors", "lazy", "numpy"),
    # Imported by `deepinfer serve` alone, so what the extra brings may stand at the top.
    "server": (
        f"{PLAIN} {DOOR} serving recipes __init__",
        "executors __main__",
        "lazy",
        "fastapi starlette uvicorn prometheus_client pydantic",
    ),
    "ops": (f"{PLAIN} api sampling", "", "yes", "numpy"),
    "native": (f"{PLAIN} api ops sampling", "", "yes", "numpy"),
    "layers": (f"{PLAIN} api ops parallel", "", "yes", "numpy"),
    "models": (
        f"{PLAIN} api layers ops config",
        "tokenizer",
        "yes",
        "numpy gguf safetensors tqdm huggingface_hub",
    ),
    "sampling": (f"{PLAIN} api ops parallel", "", "yes", "numpy"),
    "parallel": (f"{PLAIN} api config", "", "yes", "numpy"),
    "worker": (f"{PLAIN} api config plugins resolution {HANDS}", "", "yes", "numpy"),
    "executors": (f"{PLAIN} api config plugins resolution", HANDS, "lazy", "numpy"),
    "testing": ("*", "*", "yes", "*"),
}


@pytest.mark.parametrize("path", core_files(), ids=lambda p: "/".join(p.parts[-2:]))
def test_imports_stay_inside_the_fence(path):
    name = room(path)
    assert name in TABLE, f"room {name!r} is new: give it a line in the table, with a reason"
    now, later, torch, outside = TABLE[name]
    wrong = []
    for found in imports(path):
        top = found.module.split(".")[0]
        if top == "deepinfer":
            allowed = f"{name} {now} {later if found.lazy else ''}".split()
            here = room_of_module(found.module)
            bad = here not in allowed and ("*" not in allowed or here in LEAVES)
        elif top == "torch":
            bad = torch == "never" or (torch == "lazy" and not found.lazy)
        else:
            known = outside.split()
            bad = top not in sys.stdlib_module_names and top not in known and "*" not in known
            bad = bad and not found.lazy
        if bad:
            wrong.append(f"line {found.line}: {found.module}{' (lazy)' * found.lazy}")
    assert not wrong, f"{path}: {'; '.join(wrong)}"


LOADED = "import json, sys; {}; print(json.dumps(sorted(sys.modules)))"


@pytest.mark.parametrize("module, source", windows(), ids=lambda v: str(v).split("/")[-1])
def test_a_window_loads_nothing_heavy(module, source):
    loaded = json.loads(
        fresh(LOADED.format(f"sys.path.insert(0, {str(source)!r}); import {module}"))
    )
    assert not {"torch", "numpy", "pydantic"} & set(loaded)


def test_the_package_loads_nothing_heavy():
    loaded = json.loads(fresh(LOADED.format("import deepinfer")))
    assert not {"torch", "numpy", "pydantic", "pluggy"} & set(loaded)


LIGHT = ("config", "plugins", "api", "engine.engine", "testing.conformance.plugin")


@pytest.mark.parametrize("module", LIGHT)
def test_the_brain_does_not_load_torch(module):
    loaded = json.loads(fresh(LOADED.format(f"import deepinfer.{module}")))
    assert "torch" not in loaded
    assert module.startswith("engine") or "numpy" not in loaded
