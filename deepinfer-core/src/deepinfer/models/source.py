"""From what the user typed to files on this disk.

Where you are: the first step of a load. ``resolve`` turns ``model=`` into a ``ModelSource``;
``checkpoint.open_checkpoint`` and ``tokenizer.load_tokenizer`` take it from there. Neither torch
nor huggingface_hub is imported before it is needed.

A mistyped path must not become a download: whatever begins with ``/``, ``.`` or ``~``, has more
than one slash, ends with ``.gguf`` or exists is a path. ``demo`` is the demo model; a folder of
that name is ``./demo``.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

from deepinfer import settings
from deepinfer.errors import ModelNotFoundError, shown

_LOCAL_COPY: Final = "DEEPINFER_HF_MODEL_DIR"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_TOKENIZER_FILES: Final = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
_MODEL_FILES: Final = (*_TOKENIZER_FILES, "*.safetensors")
_UNWANTED: Final = ("*/*.safetensors", "consolidated*.safetensors", "*.bin.index.json")
_WAYS_OUT: Final = (
    f"Set {_LOCAL_COPY} to a local copy, give a path to a model directory or a GGUF file, or use "
    "model='demo' (SmolLM2-135M-Instruct from the package index)."
)
_DRAFT_WAYS_OUT: Final = "Give the path of a draft checkpoint's folder, or its hub id."


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies.

    Attributes:
        kind: "hf" for a directory with config.json and safetensors, "gguf" for one file.
        path: that directory or file.
        tokenizer_path: a directory with tokenizer files, or a GGUF file.
        name: how to call the model in messages and in the API.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    tokenizer_path: Path
    name: str


def resolve(
    model: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    weights: bool = True,
    setting: str = "model",
) -> ModelSource:
    """Find a model, fetching it if it is ``demo`` or a hub id.

    Args:
        model: a directory, a GGUF file, ``demo``, or a hub id such as ``org/name``.
        revision: branch, tag or commit on the hub; paths and local copies ignore it.
        tokenizer: where the tokenizer lies if not with the model; a path or a hub id.
        weights: False: from a hub, fetch only what describes the model.
        setting: what named it, for errors.

    Raises:
        ModelNotFoundError: nothing is there; the message says what was looked for and what to do.
    """
    path, name = _find(model, revision, _MODEL_FILES if weights else _TOKENIZER_FILES, setting)
    kind: Literal["hf", "gguf"] = "gguf" if path.is_file() else "hf"
    if kind == "hf" and not (path / "config.json").exists():
        _no_config(path, setting)
    beside = path
    if tokenizer is not None:
        beside, _ = _find(tokenizer, None, _TOKENIZER_FILES, "tokenizer")
        if beside.is_file() and beside.suffix != ".gguf":
            beside = beside.parent
    return ModelSource(kind, path, beside, name)


def _find(
    what: str, revision: str | None, patterns: tuple[str, ...], setting: str
) -> tuple[Path, str]:
    """A path on this disk and a name to show."""
    if not what.strip():
        raise ModelNotFoundError(
            f"{setting} is empty.", setting=setting, next_step=_ways_out(setting)
        )
    if what == "demo":
        from deepinfer.models import demo

        return demo.fetch(), demo.NAME
    if _is_path(what):
        path = _existing(_home(what), what, setting)
        return _only_gguf(path, setting), Path(os.path.abspath(path)).name
    if _HUB_ID.fullmatch(what) is None:
        _refuse(f"{_path(what)} is neither an existing path nor a hub id", what, setting)
    copy = settings.read(_LOCAL_COPY)
    if copy is not None:
        return _only_gguf(_in_local_copy(_home(copy), what, setting), setting), what
    return _from_hub(what, revision, patterns, setting), what


def _ways_out(setting: str) -> str:
    """What to do: the demo model is no draft."""
    return _DRAFT_WAYS_OUT if setting == "speculative" else _WAYS_OUT


def _path(what: str) -> str:
    """As messages show it: longer than most paths are, shorter than what is none."""
    return shown(what, 300)


def _home(what: str) -> Path:
    """With ``~`` spelt out, where there is such a home."""
    return Path(os.path.expanduser(what))


def _is_path(what: str) -> bool:
    looks = what.startswith(("/", ".", "~")) or what.count("/") > 1 or "\\" in what
    return looks or what.lower().endswith(".gguf") or os.path.exists(what)


def _existing(path: Path, what: str, setting: str) -> Path:
    if os.path.exists(path):
        if path.is_file() and setting != "tokenizer" and path.suffix.lower() != ".gguf":
            _refuse(f"{_path(what)} is a file but not a GGUF file", what, setting)
        return path
    _refuse(f"No file or directory {_path(str(path))}", what, setting)


def _refuse(message: str, what: str, setting: str) -> NoReturn:
    near = _near(_home(what))
    raise ModelNotFoundError(f"{message}.{near}", setting=setting, next_step=_ways_out(setting))


def _near(path: Path) -> str:
    """What stands beside a path that does not exist, likest first."""
    parent = path.parent
    if not os.path.isdir(parent):
        return f" The parent directory {_path(str(parent))} does not exist either."
    try:
        names = sorted(entry.name for entry in parent.iterdir())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f" Near names in {str(parent)!r}: {', '.join(close)}." if close else ""


def _only_gguf(path: Path, setting: str) -> Path:
    """A directory without safetensors but with exactly one GGUF file means that file."""
    if path.is_file() or setting == "tokenizer" or any(path.glob("*.safetensors")):
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelNotFoundError(
            f"{str(path)!r} holds {len(files)} GGUF files: {', '.join(f.name for f in files)}.",
            setting=setting,
            next_step="Name one of them.",
        )
    return files[0] if files else path


def _no_config(path: Path, setting: str) -> NoReturn:
    names = sorted(entry.name for entry in path.iterdir())
    found = f"holds {', '.join(names[:8])}{' …' if len(names) > 8 else ''}" if names else "is empty"
    raise ModelNotFoundError(
        f"{str(path)!r} is no model directory: no config.json (it {found}).",
        setting=setting,
        next_step=_ways_out(setting),
    )


def _in_local_copy(root: Path, hub_id: str, setting: str) -> Path:
    """``root`` holds org/name or name, or is the model itself."""
    candidates = [root / hub_id, root / hub_id.rpartition("/")[2]]
    for candidate in candidates:
        if os.path.exists(candidate):
            return candidate
    known = os.path.isfile(root) or os.path.exists(root / "config.json")
    if known or (os.path.isdir(root) and any(root.glob("*.gguf"))):
        return root
    looked = ", ".join(_path(str(c)) for c in dict.fromkeys(candidates))
    raise ModelNotFoundError(
        f"{_LOCAL_COPY} is set to {_path(str(root))}, which holds no copy of {_path(hub_id)}: "
        f"looked for {looked} and for a config.json in the folder itself.{_near(candidates[-1])}",
        setting=_LOCAL_COPY,
        next_step="Correct the variable, or unset it to use the hub.",
    )


def _from_hub(hub_id: str, revision: str | None, patterns: tuple[str, ...], setting: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as why:
        raise ModelNotFoundError(
            f"{hub_id!r} looks like a hub id, and huggingface_hub is not installed.",
            setting=setting,
            next_step=f"pip install huggingface-hub. Or: {_ways_out(setting)}",
        ) from why
    try:
        found = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_UNWANTED),
        )
    except Exception as why:  # whatever a client, a proxy or a disk can raise
        raise ModelNotFoundError(
            f"{_path(hub_id)} is no local path and could not be had from the hub"
            f"{f' at revision {revision!r}' if revision else ''}: {_cause(why)}."
            f"{_near(Path(hub_id)) if os.path.isdir(Path(hub_id).parent) else ''}",
            setting=setting,
            next_step=_ways_out(setting),
        ) from why
    return Path(found)


def _cause(error: BaseException) -> str:
    """The innermost reason in one line: hub errors wrap connection errors."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    first = (str(inner).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(inner).__name__}: {first}" if first else type(inner).__name__
