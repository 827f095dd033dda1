"""``deepinfer plugins list | doctor | new``: what is installed, what ails it, how to write one.

The reader stands at the terminal's end of ``deepinfer.discovery`` and ``deepinfer.plugins``;
they are imported inside the commands, so that ``deepinfer --help`` stays quick.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from deepinfer.cli.hygiene import Report
    from deepinfer.discovery import Plugin
    from deepinfer.plugins import Offer, PluginManager


@click.group()
def plugins() -> None:
    """List plugins, examine them, start a new one."""


@plugins.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--no-plugin", "disable", multiple=True, metavar="NAME", help="Leave one out.")
def list_(as_json: bool, disable: tuple[str, ...]) -> None:
    """Show every installed plugin, what it sells, and what can run here."""
    from deepinfer.plugins import PluginManager

    with contextlib.redirect_stdout(sys.stderr):  # a window that prints must not spoil the JSON
        manager = PluginManager(disable=disable)
    rows = [_row(plugin, manager) for plugin in manager.plugins]
    click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(_table(rows)))


@plugins.command()
@click.argument("name", required=False)
def doctor(name: str | None) -> None:
    """Examine one plugin (or all): metadata, import in a fresh interpreter, probes, versions.

    Ends with code 1 if one of them is broken.
    """
    from deepinfer.discovery import discover

    found = discover()
    patients = [plugin for plugin in found if name in (None, plugin.name)]
    if not patients:
        known = [plugin.name for plugin in found]
        near = "".join(f" Did you mean {n}?" for n in difflib.get_close_matches(name or "", known))
        raise click.ClickException(f"No plugin is called {name}.{near} Known: {', '.join(known)}.")
    results = [_examine(plugin) for plugin in patients]  # all, also behind a broken one
    raise SystemExit(0 if all(results) else 1)


@plugins.group()
def new() -> None:
    """Start a plugin from a template."""


@new.command()
@click.argument("path", type=click.Path(file_okay=False))
@click.option("--name", help="What users will write; by default from the folder's name.")
def backend(path: str, name: str | None) -> None:
    """Write an installable backend into PATH: it runs on a CPU and passes conformance."""
    from deepinfer.cli.scaffold import TemplateError, backend_name, write_backend

    try:
        chosen = backend_name(path) if name is None else name
        written = write_backend(path, chosen)
    except TemplateError as why:
        raise click.ClickException(str(why)) from None
    click.echo("\n".join(str(file) for file in written))
    click.echo(f"\nNext:\n  pip install -e {click.format_filename(path)}[test]")
    click.echo(f"  deepinfer plugins doctor {chosen}")
    click.echo(f"  pytest --pyargs deepinfer.testing.conformance --backend {chosen}")


def _row(plugin: Plugin, manager: PluginManager) -> dict[str, Any]:
    """One plugin as plain data; this shape is what ``--json`` promises."""
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "api": plugin.api,
        "requires": list(plugin.requires),
        "state": plugin.state,
        "reason": plugin.reason,
        "specs": [_spec(o, manager) for o in manager.offers() if o.plugin is plugin],
    }


def _spec(offer: Offer, manager: PluginManager) -> dict[str, Any]:
    answer = manager.available(offer)
    return {
        "kind": offer.spec.kind,
        "name": offer.spec.name,
        "priority": offer.spec.priority,
        "offers": sorted(offer.spec.offers),
        "needs": sorted(offer.spec.needs),
        "state": answer.state,
        "reason": answer.reason,
    }


def _table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        reason = f": {row['reason']}" if row["reason"] else ""
        owner = f"{row['distribution']} {row['version']}"
        yield f"{row['name']}  ({owner}, API {row['api']})  {row['state']}{reason}"
        for spec in row["specs"]:
            offers = f"offers {', '.join(spec['offers'])}" if spec["offers"] else ""
            note = spec["reason"] or offers
            line = f"  {spec['kind']:<11}{spec['name']:<14}{spec['state']:<10}{note}"
            yield line.rstrip()


def _examine(plugin: Plugin) -> bool:
    """Print one plugin's findings; False if it is broken."""
    from deepinfer.cli.hygiene import examine

    click.echo(f"{plugin.name} ({plugin.distribution} {plugin.version})")
    if plugin.state != "ready":
        _say("--" if plugin.state in ("other-api", "disabled") else "FAIL", plugin.reason)
        _next(_NEXT[plugin.state])
        return not plugin.faulty and plugin.state != "duplicate"
    _say("ok", f"metadata: window {plugin.value}, API {plugin.api}")
    if plugin.name != "core":
        stated = ", ".join(plugin.requires)
        _say("ok" if stated else "note", stated or "states no range of deepinfer-core: it should")
        _say("ok", f"versions: {_versions(plugin.distribution)}")
    return _print_report(examine(plugin))


def _print_report(report: Report) -> bool:
    if report.failure:
        _say("FAIL", f"import: {report.failure}")
        click.echo(report.trace)
        _next("Correct or uninstall it; until then the engine leaves it out.")
        return False
    millis = f"{report.seconds * 1e3:.0f} ms in a fresh interpreter"
    if not report.touched:
        _say("ok", f"import: {millis}, and it leaves the host alone")
    for sentence in report.touched:
        _say("FAIL", f"import: {sentence}")
    marks = {"usable": "ok", "unusable": "--", "broken": "FAIL"}
    for spec in report.specs:
        _say(marks[spec.state], f"{spec.kind} {spec.name}: {spec.reason or spec.state}")
        click.echo(spec.trace, nl=bool(spec.trace))
    if report.touched:
        _next("Move what it does at import behind the load path.")
    return not report.touched and all(spec.state != "broken" for spec in report.specs)


def _versions(distribution: str) -> str:
    """Python, and the distribution's own requirements as they are installed."""
    import platform

    import importlib_metadata
    from packaging.requirements import Requirement

    from deepinfer.discovery import installed_version

    lines = importlib_metadata.requires(distribution) or []
    wanted = [Requirement(line) for line in lines]
    here = [r.name for r in wanted if r.marker is None or r.marker.evaluate()]
    found = [f"{name} {installed_version(name)}" for name in here]
    return ", ".join([f"Python {platform.python_version()}", *found])


_NEXT = {
    "other-api": "Install a version of it that registers in the group of this core's API.",
    "version": "Install versions of the two that fit: pip install --upgrade deepinfer-core.",
    "duplicate": "Uninstall one of the two; until then no engine starts.",
    "disabled": "Take it off the disable list.",
}


def _say(mark: str, text: str) -> None:
    click.echo(f"  {mark:<5}{text}")


def _next(text: str) -> None:
    click.echo(f"  next: {text}")
