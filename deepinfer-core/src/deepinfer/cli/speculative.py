"""``deepinfer speculative``: ``calibrate`` fits a draft's confidences to what stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from deepinfer.cli.options import doing, engine_config, engine_options, fetch_demo
from deepinfer.errors import ConfigError

_TEMPERATURE: Final = {"greedy": "T = 0", "sampled": "T = 1"}


@click.group()
def speculative() -> None:
    """Tend drafts of speculative decoding."""


@speculative.command()
@engine_options
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Lines {"turns": ["…"]} (a chat\'s first turn) or {"prompt": "…"} (a plain text). '
    "Without it a few texts of our own, which is little.",
)
@click.option("--limit", type=click.IntRange(1), help="Lines of the file, from its beginning.")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True, help="An answer.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Answers to each prompt at T = 1.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. Default: calibration.json beside the draft's weights.",
)
@click.option("--json", "as_json", is_flag=True)
def calibrate(
    engine: dict[str, Any],
    prompts: Path | None,
    limit: int | None,
    tokens: int,
    samples: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Run prompts at T = 0 and T = 1 with every draft verified, fit one temperature for each
    position and write them down; prints calibration errors before and after.

    A draft's confidence decides how many of its drafts are verified (mode adaptive), so one that
    means what it says is faster. Texts do not depend on it.
    """
    from deepinfer.testing.calibration import Workload
    from deepinfer.testing.calibration import calibrate as run

    config = engine_config(engine)
    fetch_demo(config.model)
    given = [] if prompts is None else read_prompts(prompts, limit)
    with doing("loading the model") as tell:
        work = Workload(prompts=given, tokens=tokens, samples=samples)
        found = run(config, work, out, tell)
    if as_json:
        parts = {"temperatures": found.temperatures, "before": found.before, "after": found.after}
        click.echo(json.dumps({"path": str(found.path), **parts}))
        return 0
    for way, temperatures in found.temperatures.items():
        click.echo(f"{way} ({_TEMPERATURE[way]}), by position")
        click.echo(f"  temperature              {_row(temperatures, '{:.2f}')}")
        for name, errors in (("before", found.before[way]), ("after", found.after[way])):
            percent = [100 * error for error in errors]
            click.echo(f"  {'calibration error ' + name:<24} {_row(percent, '{:.1f}')} %")
    click.echo(f"wrote {found.path}")
    return 0


def read_prompts(file: Path, limit: int | None) -> list[Any]:
    """Texts, and conversations of one turn.

    Raises:
        ConfigError: a line is neither; it is named.
    """
    found: list[Any] = []
    for number, line in enumerate(file.read_bytes().splitlines()[:limit], 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
            if not isinstance(said, dict):
                raise TypeError("no object")
            if "turns" in said:
                found.append([{"role": "user", "content": _text(said["turns"][0])}])
            else:
                found.append(_text(said["prompt"]))
        except (ValueError, KeyError, IndexError, TypeError) as why:
            raise ConfigError(
                f'{file}, line {number}: expected {{"turns": ["…"]}} or {{"prompt": "…"}}, '
                f"found {line[:60].decode('utf-8', 'replace')!r}.",
                setting="prompts",
            ) from why
    if not found:
        raise ConfigError(f"{file} holds no line.", setting="prompts")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("no text")
    return value


def _row(values: Any, shape: str) -> str:
    return " ".join(f"{shape.format(value):>6}" for value in values)
