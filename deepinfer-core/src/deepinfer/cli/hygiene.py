"""Does importing a plugin's window leave its host alone? Answered in a fresh interpreter.

``examine`` starts one, which imports the window, compares what a guest may not touch before and
after, and asks the probes. The caller's process imports nothing, so a window that crashes or
hangs costs it a sentence. Used by ``deepinfer plugins doctor`` and the conformance kit.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deepinfer.discovery import Plugin

_MARK: Final = "deepinfer-hygiene:"
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from deepinfer.cli.hygiene import main; main(sys.argv[1])"
)
_INHERITED: Final = "import json, os; print(json.dumps(dict(os.environ)))"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecReport:
    """One spec of the window and what its probe said."""

    kind: str
    name: str
    state: str
    reason: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a window in a fresh interpreter.

    Attributes:
        failure: empty, or why it could not be opened; ``trace`` says where.
        touched: a sentence for each thing that the import changed and may not change.
        seconds: how long the import took.
        specs: what it sells, with the probes' answers.
    """

    failure: str = ""
    trace: str = ""
    touched: tuple[str, ...] = ()
    seconds: float = 0.0
    specs: tuple[SpecReport, ...] = ()


def examine(plugin: Plugin, *, timeout: float = 60.0, probe_seconds: float = 5.0) -> Report:
    """Open a plugin's window in a fresh interpreter and report; never raises for its faults."""
    order = {"name": plugin.name, "value": plugin.value, "seconds": probe_seconds}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _START, json.dumps({**order, "path": sys.path})],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Report(failure=f"opening its window took longer than {timeout:g} s")
    _, mark, text = done.stdout.rpartition(_MARK)
    if not mark:
        failure = f"the interpreter that opened its window ended with code {done.returncode}"
        return Report(failure=failure, trace=done.stderr[-4000:])
    found = json.loads(text)
    found["specs"] = tuple(SpecReport(**spec) for spec in found["specs"])
    return Report(**{**found, "touched": tuple(found["touched"])})


def main(order: str) -> None:
    """The fresh interpreter's half: one marked line of JSON on standard output."""
    from deepinfer.discovery import Plugin

    given = json.loads(order)
    plugin = Plugin(name=given["name"], value=given["value"], distribution="", version="", api=1)
    report = _inspect(plugin, given["seconds"])
    print(_MARK + json.dumps(asdict(report)), flush=True)
    os._exit(0)  # a probe that hangs, or a thread the window started, must not keep us here


def _inspect(plugin: Plugin, probe_seconds: float) -> Report:
    import deepinfer.api  # noqa: F401  (what a window may import is not its doing)
    from deepinfer.discovery import import_path, open_window, probe

    before, heard, start = _state(), io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
            import_path(plugin.value)
        seconds = time.perf_counter() - start
        touched = _differences(before, _state(), plugin.value)
        _, specs = open_window(plugin)
    except BaseException as why:
        return Report(failure=repr(why), trace=traceback.format_exc())
    if heard.getvalue():
        touched.append(f"it prints: {heard.getvalue()[:80]!r}")
    answers = [(spec, probe(spec, probe_seconds)) for spec in specs]
    return Report(
        touched=tuple(touched),
        seconds=seconds,
        specs=tuple(SpecReport(kind=s.kind, name=s.name, **asdict(a)) for s, a in answers),
    )


def _state() -> dict[str, Any]:
    """What belongs to the host."""
    root = logging.getLogger()
    return {
        "environment variables": _environment(),
        "signal handlers": {s.name: signal.getsignal(s) for s in signal.Signals},
        "logging": {
            "root handlers": list(root.handlers),
            "root level": root.level,
            "record factory": logging.getLogRecordFactory(),
            "disabled level": root.manager.disable,
            **{f"handlers of {n}": list(h) for n, h in _handlers().items()},
        },
        "interpreter": {
            "sys.path": list(sys.path),
            "working directory": os.getcwd(),
            "exception hook": sys.excepthook,
            "warning filters": list(warnings.filters),
            "import hooks": list(sys.meta_path),
            "thread count": threading.active_count(),
            "start method": multiprocessing.get_start_method(allow_none=True),
        },
        "modules": set(sys.modules),
    }


def _environment() -> dict[str, str]:
    """As a child process inherits it: this sees what C code has set, too."""
    command = [sys.executable, "-I", "-S", "-c", _INHERITED]
    found: dict[str, str] = json.loads(subprocess.check_output(command))
    return found


def _handlers() -> Mapping[str, list[logging.Handler]]:
    loggers = logging.getLogger().manager.loggerDict.items()
    return {n: x.handlers for n, x in loggers if isinstance(x, logging.Logger) and x.handlers}


def _differences(before: dict[str, Any], after: dict[str, Any], window: str) -> list[str]:
    """A sentence for each kind of thing that changed."""
    found = []
    for what in ("environment variables", "signal handlers", "logging", "interpreter"):
        old, new = before[what], after[what]
        names = sorted(k for k in {*old, *new} if old.get(k, None) != new.get(k, None))
        if names:
            found.append(f"it changes {what}: {', '.join(names)}")
    foreign = _foreign(after["modules"] - before["modules"], window)
    if foreign:
        found.append(f"it imports more than the standard library and deepinfer.api: {foreign}")
    lost = sorted(before["modules"] - after["modules"])
    return [*found, f"it removes modules: {', '.join(lost)}"] if lost else found


def _foreign(modules: set[str], window: str) -> str:
    """What a window may not load: other distributions, and core's rooms other than the API."""
    home = window.partition(":")[0]
    known = {*sys.stdlib_module_names, home.partition(".")[0], "deepinfer"}
    light = ("deepinfer.api", "deepinfer.errors", home)
    tops = {m.partition(".")[0] for m in modules} - known
    rooms = {m for m in modules if m.startswith("deepinfer.") and not m.startswith(light)}
    return ", ".join(sorted(tops | rooms))
