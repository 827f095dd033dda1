"""An extension that was compiled from other sources is refused with a way out, never called."""

import hashlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepinfer import native
from deepinfer.__main__ import run
from deepinfer.native import INTERFACE, misfit
from deepinfer.plugins import PluginManager, Wanted

# The interface that was last looked at, and what the functions' arguments were then.
SEEN = (3, "8d83fae7b245")


def test_the_number_is_raised_with_the_arguments():
    source = (Path(native.__file__).parent / "module.c").read_text("utf-8")
    blocks = (Path(native.__file__).parent / "blocks.h").read_text("utf-8")
    takes = re.findall(r"/\*(?:[^*]|\*(?!/))*\*/\s*static const char \*op_\w+", source + blocks)
    takes += re.findall(r"/\* The arguments come in these pieces.*?\*/", blocks, re.DOTALL)
    counts = re.findall(r"^METHOD\(\w+, \d+\)", source, re.MULTILINE)
    assert len(takes) >= 10 and len(counts) >= 10
    text = " ".join(" ".join([*takes, *counts]).split())
    now = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert (INTERFACE, now) == SEEN, (
        "what a C function takes has changed: raise INTERFACE in module.c and in __init__.py, then "
        f"write down {(INTERFACE + 1, now)} here"
    )
    assert f"#define INTERFACE {INTERFACE}\n" in source


def other(**attributes):
    return SimpleNamespace(best_isa=0, is_x86=0, set_threads=lambda _: None, **attributes)


@pytest.mark.parametrize(
    "extension", [other(), other(interface=INTERFACE - 1), other(interface=INTERFACE + 1)]
)
def test_another_extension_leaves_the_reference(extension, monkeypatch):
    monkeypatch.setattr(native, "_kernels", extension, raising=False)
    reason = misfit()
    assert "compiled from other sources" in reason and "reinstall deepinfer-core" in reason
    manager = PluginManager()
    offers = {offer.spec.name: manager.available(offer) for offer in manager.offers("backend")}
    assert (offers["cpu"].state, offers["cpu"].reason) == ("unusable", reason)
    resolution = manager.resolve(Wanted(kinds={"backend": None}))
    assert resolution.get("backend").name == "reference"


def test_an_extension_that_does_not_load_says_why(monkeypatch):
    monkeypatch.delattr(native, "_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "deepinfer.native._kernels", None)
    assert "cannot be loaded" in misfit() and "reinstall" in misfit()


def test_no_extension_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    assert misfit() == "native kernels were not built (no C compiler at install time)"


def test_who_loads_the_kernels_all_the_same_is_stopped(monkeypatch):
    monkeypatch.setattr(native, "_kernels", other(), raising=False)
    for name in [m for m in sys.modules if m.startswith("deepinfer.native.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepinfer.native._kernels", other())
    monkeypatch.delattr(native, "loader", raising=False)
    with pytest.raises(ImportError, match="reinstall deepinfer-core"):
        import deepinfer.native.backend  # noqa: F401


def test_the_doctor_names_it(monkeypatch, tmp_path, capsys):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "sys.modules['deepinfer.native._kernels'] = types.SimpleNamespace(best_isa=0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit):
        run(["plugins", "doctor", "core"])
    said = " ".join(capsys.readouterr().out.split())
    assert "compiled from other sources" in said and "reinstall deepinfer-core" in said
