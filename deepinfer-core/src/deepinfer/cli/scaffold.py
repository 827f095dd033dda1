"""What ``deepinfer plugins new`` writes: the files of a template, with names filled in.

They lie in ``deepinfer/templates``. Each file ends in ``.tmpl``, so that no tool takes it for
source; ``$name`` and its like are filled in by ``string.Template``, and a folder called
``PACKAGE`` gets the import name.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Final

from deepinfer import __version__

_TEMPLATES: Final = Path(__file__).parents[1] / "templates"
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TAKEN: Final = frozenset({"ascend", "core", "cpu", "cuda", "reference"})
_PREFIX: Final = "deepinfer_backend_"


class TemplateError(Exception):
    """A name or a folder that a template cannot be written for."""


def backend_name(path: str) -> str:
    """The name that a folder suggests: ``.../deepinfer-backend-my-chip`` -> ``my_chip``."""
    folder = Path(path).resolve().name.lower().replace("-", "_").replace(".", "_")
    return folder.removeprefix(_PREFIX)


def write_backend(path: str, name: str) -> list[Path]:
    """Write the backend template into a new or empty folder; return the files written.

    Raises:
        TemplateError: the name is no good, the folder holds something, or it cannot be written.
    """
    _check_name(name)
    target = Path(path)
    try:
        if target.exists() and any(target.iterdir()):
            raise TemplateError(f"{path} is not empty; nothing was written.")
        files = dict(_filled(_TEMPLATES / "backend", _words(name)))
        if not files:
            raise TemplateError(f"This installation lacks {_TEMPLATES}; reinstall deepinfer-core.")
        for place, text in files.items():
            (target / place).parent.mkdir(parents=True, exist_ok=True)
            (target / place).write_text(text, "utf-8")
    except OSError as why:
        raise TemplateError(f"{path} cannot be written: {why}") from why
    return [target / place for place in files]


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise TemplateError(
            f"{name!r} is no name for a backend: use a-z, 0-9 and _, starting with a letter, "
            "at most 40, no Python keyword. Give one with --name."
        )
    if name in _TAKEN:
        raise TemplateError(f"{name!r} is taken by DeepInfer itself. Give another with --name.")


def _words(name: str) -> Mapping[str, str]:
    """What the templates may say."""
    return {
        "name": name,
        "package": _PREFIX + name,
        "distribution": (_PREFIX + name).replace("_", "-"),
        "title": "".join(part.capitalize() for part in name.split("_")),
        "core": ".".join(__version__.split(".")[:2]),
    }


def _filled(root: Path, words: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    for source in sorted(root.rglob("*.tmpl")):
        place = source.relative_to(root).with_suffix("")
        parts = [words["package"] if part == "PACKAGE" else part for part in place.parts]
        yield Path(*parts), Template(source.read_text("utf-8")).substitute(words)
