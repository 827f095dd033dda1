"""The published way in: ``build.sh`` and the requirements that it reads."""

import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(tmp_path, accelerator):
    """(code, stderr, what Python was asked) of the script, with a Python that only notes."""
    noted, python = tmp_path / "noted", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = {k: v for k, v in os.environ.items() if k != "DEEPINFER_ACCELERATOR"}
    environment |= {"PYTHON": str(python)}
    if accelerator is not None:
        environment["DEEPINFER_ACCELERATOR"] = accelerator
    done = subprocess.run(
        [str(ROOT / "build.sh")], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    return done.returncode, done.stderr, noted.read_text() if noted.exists() else ""


@pytest.mark.parametrize(
    ("accelerator", "installed"),
    [
        ("nvidia", "-m pip install -r requirements-nvidia.txt"),
        (None, "-m pip install -c constraints.txt ./deepinfer-core"),
    ],
)
def test_it_installs_what_is_asked_for_and_looks_whether_that_works(
    tmp_path, accelerator, installed
):
    code, _, asked = build(tmp_path, accelerator)
    assert code == 0
    assert asked.splitlines() == [installed, "-m deepinfer doctor --quick"]


@pytest.mark.parametrize("accelerator", ["ascend", "tpu"])
def test_what_it_does_not_know_it_says(tmp_path, accelerator):
    code, said, asked = build(tmp_path, accelerator)
    assert code == 1 and asked == ""
    assert f"DEEPINFER_ACCELERATOR={accelerator}" in said


def test_the_requirements_name_distributions_that_are_here():
    lines = (ROOT / "requirements-nvidia.txt").read_text("utf-8").splitlines()
    for line in (text for text in lines if text and not text.startswith("#")):
        project = tomllib.loads((ROOT / line / "pyproject.toml").read_text("utf-8"))["project"]
        assert project["name"] == line.removeprefix("./")


def test_the_example_takes_a_device():
    script = ROOT / "examples" / "offline_inference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--device", "npu"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "npu" in done.stderr and "Traceback" not in done.stderr
