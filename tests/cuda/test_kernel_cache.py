"""Compiled kernels on disk: found again by other processes and in other places, host left alone."""

import json
import shutil

import pytest
from tested import NEEDS_TRITON

pytestmark = NEEDS_TRITON
NONE = {"compiled": 0, "loaded": 0}


@pytest.fixture
def run(script, tmp_path, monkeypatch):
    """What a process says that uses a folder; Triton's own cache is in a home of its own."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def go(folder, **environment):
        home = str(tmp_path / "home")
        said = script("cached.py", str(folder), HOME=home, TRITON_HOME=home, **environment)
        return json.loads(said.splitlines()[-1])

    return go


def test_a_second_process_compiles_nothing_also_from_a_copy(run, tmp_path):
    one, copy = tmp_path / "one", tmp_path / "copy"
    assert run(one) == [{"compiled": 2, "loaded": 0}, NONE, False, True]
    assert run(one) == [{"compiled": 0, "loaded": 2}, NONE, False, True]
    shutil.move(one, copy)
    assert run(copy) == [{"compiled": 0, "loaded": 2}, NONE, False, True]


def test_kernels_of_others_lie_where_they_always_did(run, tmp_path):
    run(tmp_path / "ours")
    theirs = {path.stem for path in (tmp_path / "home").rglob("*.cubin")}
    ours = {path.stem for path in (tmp_path / "ours").rglob("*.cubin")}
    assert theirs == {"foreign_kernel"}
    assert ours == {"silu_mul_kernel", "rms_norm_kernel"}


def test_a_damaged_entry_is_compiled_again(run, tmp_path):
    folder = tmp_path / "ours"
    run(folder)
    for group in folder.rglob("__grp__silu*"):
        for path in group.parent.iterdir():
            path.unlink()
    assert run(folder)[0] == {"compiled": 1, "loaded": 1}


def test_a_folder_that_the_user_gave_triton_is_noticed(run, tmp_path):
    assert run(tmp_path / "ours", TRITON_CACHE_DIR=str(tmp_path / "theirs"))[2] is True


def test_folders_are_named_after_device_and_compiler(sources, tmp_path):
    import triton
    from deepinfer_backend_cuda.kernel_cache import folder

    wanted = f"nvidia-h200-triton-{triton.__version__}"
    assert folder(tmp_path, "NVIDIA H200") == tmp_path / "kernels" / wanted
