"""The eight ``DEEPINFER_*`` variables: one table, and the only reader of ``os.environ``.

An argument wins over the environment, the environment over the default. A ninth variable
needs a decision record. ``docs/settings.md`` is generated from this table.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from deepinfer.errors import ConfigError

LONGEST_DRAFT: Final = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable. ``parse`` raises ValueError saying what it expects; ``used_by`` is a room."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    used_by: str
    meaning: str


def _flag(text: str) -> bool:
    value = {"1": True, "true": True, "0": False, "false": False}.get(text.strip().lower())
    if value is None:
        raise ValueError("expected 0 or 1")
    return value


def _count(text: str, most: int | None = None) -> int:
    value = int(text) if text.strip().isdigit() else -1
    if value < 0 or (most is not None and value > most):
        bound = "or more" if most is None else f"to {most}"
        raise ValueError(f"expected a whole number, 0 {bound}")
    return value


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return text

    return parse


SETTINGS: Final[Mapping[str, Setting]] = {
    s.name: s
    for s in (
        Setting(
            "DEEPINFER_BATCH_INVARIANT",
            _flag,
            False,
            "config",
            "1 makes results independent of batch composition; what cannot keep it is refused.",
        ),
        Setting(
            "DEEPINFER_ENABLE_MTP_VARLEN",
            _flag,
            False,
            "deepinfer-speculative",
            "1 switches speculative decoding on, with the draft that the checkpoint carries; 0 or "
            "unset leaves it off.",
        ),
        Setting(
            "DEEPINFER_USE_NEXTN_DECODE",
            partial(_count, most=LONGEST_DRAFT),
            5,
            "deepinfer-speculative",
            "The draft length; unset, 5 or what the draft was trained for, whichever is less; 0 is "
            "off.",
        ),
        Setting(
            "DEEPINFER_HF_MODEL_DIR",
            str,
            None,
            "models.source",
            "A local copy that is used in place of a hub download.",
        ),
        Setting(
            "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",
            _count,
            32,
            "parallel",
            "Lower bound of spare experts; rounded up so that the total divides by the ranks.",
        ),
        Setting(
            "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
            _one_of("compact", "mask", "off", "exact"),
            "compact",
            "config",
            "How models with late layers that keep no KV of all tokens skip them at prefill; "
            "other models ignore it.",
        ),
        Setting(
            "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
            _count,
            140,
            "config",
            "Tokens that the cut keeps: at least the window plus the rollback; models without a "
            "cut ignore it.",
        ),
        Setting(
            "DEEPINFER_ACCELERATOR",
            _one_of("nvidia", "ascend"),
            None,
            "config",
            "The platform build to use; unset lets the backend probes decide.",
        ),
    )
}


def read(name: str, argument: Any = None) -> Any:
    """Return the argument if one was given, else the variable's parsed value, else its default.

    Raises:
        ConfigError: the variable holds something that its type does not allow.
    """
    setting = SETTINGS[name]
    if argument is not None:
        return argument
    text = os.environ.get(name)
    if text is None or text == "":
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as why:
        raise ConfigError(
            f"{name}={text!r}: {why}.", setting=name, next_step="Correct or unset it."
        ) from None


def is_set(name: str) -> bool:
    """Whether the variable stands in the environment (for those who must refuse it by name)."""
    return bool(os.environ.get(name))


def named_by_user(variable: str) -> str:
    """What a variable holds whose name the user gave, as where a key lies; empty if it is unset."""
    return os.environ.get(variable, "")


def unknown() -> list[str]:
    """One sentence for each ``DEEPINFER_*`` variable that this table does not know."""
    sentences = []
    for name in sorted(n for n in os.environ if n.startswith("DEEPINFER_") and n not in SETTINGS):
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(SETTINGS)}."
        sentences.append(f"Unknown environment variable {name}.{hint}")
    return sentences


def cache_dir() -> Path:
    """The folder for what can be fetched again, by the platform's own convention.

    The only other reading of the environment: ``XDG_CACHE_HOME`` (everywhere, if absolute),
    ``LOCALAPPDATA`` on Windows, the home folder. The folder need not exist.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named and Path(named).is_absolute():
        return Path(named) / "deepinfer"
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData/Local") / "deepinfer"
    if sys.platform == "darwin":
        return home / "Library/Caches/deepinfer"
    return home / ".cache/deepinfer"


def markdown_table() -> str:
    """The documentation page's table."""
    rows = ["| variable | default | used by | meaning |", "|---|---|---|---|"]
    for s in SETTINGS.values():
        default = "unset" if s.default is None else str(s.default)
        rows.append(f"| `{s.name}` | {default} | {s.used_by} | {s.meaning} |")
    return "\n".join(rows) + "\n"
