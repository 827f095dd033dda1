"""``deepinfer doctor``: is this installation sound, and what to do where it is not.

Each check is a function that returns ``Finding``s; none of them changes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Finding:
    """``mark`` is ok, note or FAIL; only FAIL decides the exit code."""

    mark: str
    text: str
    next_step: str = ""


@click.command()
def doctor() -> None:
    """Check this installation. Ends with code 1 if something needs repair."""
    failed = False
    for check in CHECKS:
        for finding in check():
            failed |= finding.mark == "FAIL"
            click.echo(f"{finding.mark:<5} {finding.text}")
            if finding.next_step:
                click.echo(f"      next: {finding.next_step}")
    raise SystemExit(1 if failed else 0)


def check_python() -> Iterator[Finding]:
    """Which Python; the packaging metadata keeps older ones out."""
    yield Finding("ok", f"Python {'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def check_torch() -> Iterator[Finding]:
    """torch can be imported; which devices it sees."""
    try:
        import torch
    except Exception as why:  # a wheel for another CPU or driver fails in many ways
        yield Finding("FAIL", f"torch cannot be imported: {why!r}", "pip install torch")
        return
    threads = torch.get_num_threads()
    yield Finding("ok", f"torch {torch.__version__}, {threads} CPU threads")


def check_native() -> Iterator[Finding]:
    """The compiled CPU kernels are there, and of this version."""
    from deepinfer.builtin import native_kernels

    reason = native_kernels()
    if reason is None:
        yield Finding("ok", "native CPU kernels are built")
    else:
        step = "Reinstall deepinfer-core where a C compiler is; the reference backend works."
        yield Finding("note", reason, step)


def check_owners(path: Sequence[str] | None = None) -> Iterator[Finding]:
    """Exactly one distribution, ours, owns the import name ``deepinfer``."""
    from deepinfer.discovery import CORE

    owners = import_owners("deepinfer", path)
    foreign = [name for name in owners if name != CORE]
    if foreign:
        listed = ", ".join(f"{name} {version}" for name, version in owners.items())
        yield Finding(
            "FAIL",
            f"the import name deepinfer is owned by {listed}: they overwrite each other's files",
            f"pip uninstall {' '.join(foreign)}; then "
            f"pip install --force-reinstall --no-deps {CORE}",
        )
    elif owners:
        yield Finding("ok", f"the import name deepinfer belongs to {CORE} alone")
    else:
        yield Finding("note", f"{CORE} is imported from a folder and not installed")


def import_owners(module: str, path: Sequence[str] | None = None) -> dict[str, str]:
    """Distribution -> version of all whose files claim a top-level import name."""
    import importlib_metadata

    from deepinfer.discovery import canonical

    where = {} if path is None else {"path": list(path)}
    owners: dict[str, str] = {}
    for found in importlib_metadata.distributions(**where):
        named = (found.read_text("top_level.txt") or "").split()
        files = named or [file.parts[0].removesuffix(".py") for file in found.files or ()]
        if module in files:
            owners.setdefault(canonical(found.name), found.version)
    return owners


def check_settings() -> Iterator[Finding]:
    """Every ``DEEPINFER_*`` variable is known and can be read."""
    from deepinfer import settings
    from deepinfer.errors import ConfigError

    for sentence in settings.unknown():
        yield Finding("note", sentence)
    for name in settings.SETTINGS:
        try:
            value = settings.read(name)
        except ConfigError as why:
            yield Finding("FAIL", str(why))
        else:
            if settings.is_set(name):
                yield Finding("ok", f"{name} is set: {value}")


def check_plugins() -> Iterator[Finding]:
    """Every plugin can be loaded; something can run here."""
    from deepinfer.plugins import PluginManager

    manager = PluginManager()
    for plugin in manager.plugins:
        sick = plugin.faulty or plugin.state == "duplicate"
        mark = "FAIL" if sick else "ok" if plugin.state == "ready" else "note"
        reason = f" is {plugin.state}" + (f": {plugin.reason}" if plugin.reason else "")
        step = f"deepinfer plugins doctor {plugin.name}" if sick else ""
        yield Finding(mark, f"{plugin}{reason}", step)
    for offer in manager.offers():
        answer = manager.available(offer)
        if answer.state == "broken":
            step = f"deepinfer plugins doctor {offer.plugin.name}"
            yield Finding("FAIL", f"{offer}: {answer.reason}", step)
    able = [
        o.spec.name for o in manager.offers("backend") if manager.available(o).state == "usable"
    ]
    yield Finding("ok" if able else "FAIL", f"backends that can run here: {', '.join(able)}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_native,
    check_owners,
    check_settings,
    check_plugins,
)
