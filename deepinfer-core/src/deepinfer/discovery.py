"""What is installed: plugin metadata, opened windows, answered probes.

The reader stands at the very edge: foreign packages are read, judged and, only where the
metadata allows it, imported. Nothing here chooses; ``plugins`` does, from what it finds here.
Whatever a foreign package does wrong stays in its own ``Plugin`` record.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import pluggy

from deepinfer import __version__
from deepinfer.api import hookspecs
from deepinfer.api.hookspecs import PROJECT
from deepinfer.api.specs import API_VERSION, Spec, usable
from deepinfer.errors import UnknownPluginError

CORE: Final = "deepinfer-core"
CORE_VERSION: Final = __version__
_GROUP: Final = re.compile(r"deepinfer\.v(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One installed plugin: what its metadata says, and what became of it.

    Attributes:
        name: of its entry point.
        value: the window, ``package.plugin``.
        api: the major of the group it registered in.
        state: ready, disabled, other-api, duplicate, version, or broken.
        reason: why it is not ready, a clause without a full stop.
        trace: the traceback of a broken one.
        specs: what it sells, once its window is open.
    """

    name: str
    value: str
    distribution: str
    version: str
    api: int
    requires: tuple[str, ...] = ()
    state: str = "ready"
    reason: str = ""
    trace: str = ""
    specs: tuple[Spec, ...] = ()

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version})"

    @property
    def faulty(self) -> bool:
        """Whether it ought to work here and does not."""
        return self.state in ("version", "broken")


@dataclass(frozen=True, slots=True)
class Availability:
    """What a probe answered: ``state`` is usable, unusable or broken."""

    state: str
    reason: str = ""
    trace: str = ""


def discover(disable: Iterable[str] = (), path: Sequence[str] | None = None) -> list[Plugin]:
    """Every installed plugin, judged by its metadata alone: nothing is imported.

    Args:
        disable: entry-point or distribution names that stay out.
        path: where to look instead of ``sys.path``.
    """
    core = Plugin(
        name="core",
        value="deepinfer.builtin",
        distribution=CORE,
        version=CORE_VERSION,
        api=API_VERSION[0],
    )
    found = sorted(_read(path), key=lambda p: (p.api, p.name, p.distribution))
    disabled = set(disable)
    _refuse_unknown(disabled, found)
    judged = [core, *(_judge(plugin, disabled) for plugin in found)]
    counts = Counter((p.api, p.name) for p in judged if p.state != "disabled")
    return [_mark_duplicate(p, judged) if counts[p.api, p.name] > 1 else p for p in judged]


def open_window(plugin: Plugin) -> tuple[Any, tuple[Spec, ...]]:
    """Import a window, check its hooks and ask for its specs; raises whatever goes wrong."""
    window = import_path(plugin.value)
    trial = new_pluggy()  # it stands alone there, so any fault found is its own
    trial.register(window, name=plugin.name)
    trial.check_pending()
    _refuse_unmarked(window, trial)
    specs = tuple(s for answer in trial.hook.deepinfer_provide(api=API_VERSION) for s in answer)
    for spec in specs:
        if not isinstance(spec, Spec):
            raise TypeError(f"deepinfer_provide returned {spec!r}, which is no Spec")
    return window, specs


def opened(plugin: Plugin, registry: pluggy.PluginManager) -> Plugin:
    """The plugin with its specs, its window registered; or the same plugin marked broken."""
    if plugin.state != "ready":
        return plugin
    try:
        window, specs = open_window(plugin)
        registry.register(window, name=plugin.name)
    except (Exception, SystemExit) as why:  # a window that calls sys.exit is broken, no more
        reason = f"its window {plugin.value} failed with {why!r}"
        return replace(plugin, state="broken", reason=reason, trace=traceback.format_exc())
    return replace(plugin, specs=specs)


def probe(spec: Spec, seconds: float) -> Availability:
    """Ask whether a spec runs here, for at most ``seconds``; never raises.

    A probe that hangs keeps its (daemon) thread: Python has no way to take it back.
    """
    if spec.probe is usable:
        return Availability("usable")
    box: list[Availability] = []
    thread = threading.Thread(
        target=lambda: box.append(_answer(spec)), name=f"deepinfer-probe-{spec.name}", daemon=True
    )
    thread.start()
    thread.join(seconds)
    if box:
        return box[0]
    frame = sys._current_frames().get(thread.ident or 0)
    where = "".join(traceback.format_stack(frame)) if frame is not None else ""
    return Availability("broken", f"its probe did not answer within {seconds:g} s", where)


def installed_version(distribution: str, path: Sequence[str] | None = None) -> str:
    """A distribution's version by its metadata, or "not installed"."""
    import importlib_metadata

    if distribution == CORE:
        return CORE_VERSION
    where = {} if path is None else {"path": list(path)}
    for found in importlib_metadata.distributions(name=distribution, **where):
        return str(found.version)
    return "not installed"


def new_pluggy() -> pluggy.PluginManager:
    """A registry that knows the four hooks and no plugin."""
    registry = pluggy.PluginManager(PROJECT)
    registry.add_hookspecs(hookspecs)
    return registry


def import_path(path: str) -> Any:
    """``package.module`` or ``package.module:attribute`` as an object."""
    module, _, attribute = path.partition(":")
    found: Any = import_module(module)
    for name in filter(None, attribute.split(".")):
        found = getattr(found, name)
    return found


def _read(path: Sequence[str] | None) -> Iterator[Plugin]:
    """One record for each entry point of each major; the first of a distribution's copies wins."""
    import importlib_metadata  # slow enough to stay out of `deepinfer --help`

    seen: set[str] = set()
    where = {} if path is None else {"path": list(path)}
    for distribution in importlib_metadata.distributions(**where):
        found = list(_points(distribution))
        if found and canonical(found[0].distribution) not in seen:
            seen.add(canonical(found[0].distribution))
            yield from found


def _points(distribution: Any) -> Iterator[Plugin]:
    """A distribution's plugins; a torn file in a foreign package is nobody's end but its own."""
    try:
        points = [(m, e) for e in distribution.entry_points if (m := _GROUP.fullmatch(e.group))]
        windows = [(m, e, f"{e.module}:{e.attr or ''}".rstrip(":")) for m, e in points]
    except Exception:
        if _GROUP.search(distribution.read_text("entry_points.txt") or ""):
            yield _torn(distribution)
        return
    if windows:
        name, version, requires = _facts(distribution)
    for match, point, window in windows:
        yield Plugin(
            name=point.name,
            value=window,
            distribution=name,
            version=version,
            api=int(match[1]),
            requires=requires,
        )


def _torn(distribution: Any) -> Plugin:
    name, version, _ = _facts(distribution)
    return Plugin(
        name=name,
        value="",
        distribution=name,
        version=version,
        api=API_VERSION[0],
        state="broken",
        reason="its entry_points.txt cannot be read",
        trace=traceback.format_exc(),
    )


def _facts(distribution: Any) -> tuple[str, str, tuple[str, ...]]:
    """Name, version, and what it requires of core."""
    try:
        core = [r for r in distribution.requires or () if canonical(r).startswith(CORE)]
        return str(distribution.name), str(distribution.version), tuple(core)
    except Exception:  # a dist-info folder without a readable METADATA file
        return f"unreadable distribution at {distribution.locate_file('')}", "?", ()


def canonical(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _refuse_unknown(disabled: set[str], found: Sequence[Plugin]) -> None:
    """A name that disables nothing is a slip of the pen, and core's own rooms stay."""
    known = {p.name for p in found} | {canonical(p.distribution) for p in found}
    unknown = sorted(name for name in disabled if not {name, canonical(name)} & known)
    if unknown:
        raise UnknownPluginError(
            f"disable_plugins names {', '.join(unknown)}, which no installed plugin is called.",
            setting="disable_plugins",
            next_step=f"Installed: {', '.join(sorted(known)) or 'none beside core'}.",
        )


def _judge(plugin: Plugin, disabled: set[str]) -> Plugin:
    if plugin.name in disabled or canonical(plugin.distribution) in map(canonical, disabled):
        return replace(plugin, state="disabled", reason="disabled by the configuration")
    if plugin.state != "ready":
        return plugin
    if plugin.api != API_VERSION[0]:
        reason = f"installed, for API {plugin.api}; this core speaks API {API_VERSION[0]}"
        return replace(plugin, state="other-api", reason=reason)
    unmet = _unmet(plugin.requires)
    return replace(plugin, state="version", reason=unmet) if unmet else plugin


def _unmet(requires: Sequence[str]) -> str:
    """Why this core is not the one required; empty if it is."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            return f"its requirement {text!r} cannot be read"
        here = wanted.marker is None or wanted.marker.evaluate()
        mine = canonical(wanted.name) == CORE
        if mine and here and not wanted.specifier.contains(CORE_VERSION, prereleases=True):
            return f"it requires {CORE} {wanted.specifier}; this is {CORE_VERSION}"
    return ""


def _mark_duplicate(plugin: Plugin, judged: Sequence[Plugin]) -> Plugin:
    if plugin.state == "disabled":
        return plugin
    twins = [p for p in judged if (p.api, p.name) == (plugin.api, plugin.name)]
    owners = " and ".join(f"{p.distribution} {p.version}" for p in twins if p.state != "disabled")
    state = plugin.state if plugin.state == "other-api" else "duplicate"
    return replace(plugin, state=state, reason=f"{owners} both register {plugin.name!r}")


def _refuse_unmarked(window: Any, trial: pluggy.PluginManager) -> None:
    """A function that looks like a hook and carries no mark would be ignored in silence."""
    marked = {caller.name for caller in trial.get_hookcallers(window) or ()}
    stray = [n for n in dir(window) if n.startswith(f"{PROJECT}_") and n not in marked]
    stray = [n for n in stray if callable(getattr(window, n))]
    if stray:
        raise TypeError(f"{', '.join(stray)} carries no @hookimpl")
    if not marked:
        raise TypeError(f"{window!r} implements no hook")


def _answer(spec: Spec) -> Availability:
    try:
        answer = spec.probe()
    except BaseException as why:  # in a thread of ours: nothing may escape
        return Availability("broken", f"its probe raised {why!r}", traceback.format_exc())
    if answer is None:
        return Availability("usable")
    if isinstance(answer, str) and answer:
        return Availability("unusable", answer)
    return Availability("broken", f"its probe returned {answer!r}, neither None nor a reason")
