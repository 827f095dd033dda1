"""``deepinfer doctor``: is this installation sound, and what to do where it is not.

Each check is a function that yields ``Finding``s as it makes them; none of them changes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from deepinfer.plugins import Offer


@dataclass(frozen=True, slots=True)
class Finding:
    """``mark`` is ok, note or FAIL; only FAIL decides the exit code."""

    mark: str
    text: str
    next_step: str = ""


@click.command()
@click.option("--quick", is_flag=True, help="Leave out the tests of backends' kernels.")
def doctor(quick: bool) -> None:
    """Check this installation. Ends with code 1 if something needs repair."""
    failed = False
    for check in CHECKS:
        for finding in () if quick and check is check_kernels else check():
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


def check_kernels() -> Iterator[Finding]:
    """Each backend that can run here, on its device: its own examination, then its ops."""
    from deepinfer.plugins import PluginManager

    manager = PluginManager()
    for offer in manager.offers("backend"):
        answer = manager.available(offer)
        if answer.state == "unusable":
            yield Finding("note", f"{offer.spec.name}: cannot run here: {answer.reason}")
        elif answer.state == "usable" and offer.spec.name != "reference":
            yield from _examined(offer)


def _examined(offer: Offer) -> Iterator[Finding]:
    name, path = offer.spec.name, offer.spec.parts().get("doctor")
    try:
        if path is not None:
            from deepinfer.discovery import import_path

            for mark, text, step in import_path(path)():
                yield Finding(mark, f"{name}: {text}", step)
        yield from _ops(name)
    except Exception as why:  # a device can fail in any way, and that is a finding
        yield Finding("FAIL", f"{name}: the examination ended with {why!r}")


def _ops(name: str) -> Iterator[Finding]:
    from deepinfer.testing.selftest import check_ops

    found = check_ops(name)
    for sentence in found.wrong:
        yield Finding("FAIL", f"{name}: {sentence}")
    more = f", {found.left} left out for time" if found.left else ""
    yield Finding(
        "FAIL" if found.wrong else "ok",
        f"{name}: {found.ran - len(found.wrong)} of {found.ran} cases of {found.ops} ops give what "
        f"their references give{more} ({found.seconds:.0f} s)",
    )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_native,
    check_owners,
    check_settings,
    check_plugins,
    check_kernels,
)
