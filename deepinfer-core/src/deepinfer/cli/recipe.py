"""``deepinfer recipe``: a recipe on texts from arguments, files or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import click

from deepinfer.cli.options import (
    NO_LIMIT,
    drawing_options,
    engine_options,
    open_llm,
    sampling_params,
)
from deepinfer.cli.reading import TEXT_FILE, as_json, as_text, standard_input


@click.command()
@click.argument("name", required=False)
@click.argument("texts", nargs=-1)
@click.option(
    "-f", "--file", "files", type=TEXT_FILE, multiple=True, help="A document; repeatable."
)
@click.option("--options", type=TEXT_FILE, help="The recipe's options: a JSON file.")
@click.option("-o", "--option", "pairs", multiple=True, metavar="KEY=VALUE", help="JSON or text.")
@click.option("--max-repairs", type=click.IntRange(min=0), default=2, show_default=True)
@click.option("--steps", is_flag=True, help="Write everything that was tried, as jsonl.")
@drawing_options
@engine_options
def recipe(
    name: str | None,
    texts: tuple[str, ...],
    files: tuple[IO[str], ...],
    options: IO[str] | None,
    pairs: tuple[str, ...],
    max_repairs: int,
    steps: bool,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> int:
    """Run the recipe NAME on TEXTS; without a name, list what there is.

    A line of JSON for each text; the exit code is 1 if a result is not valid.
    """
    from deepinfer.plugins import PluginManager
    from deepinfer.recipes.registry import listed, made
    from deepinfer.recipes.running import run

    manager = PluginManager(disable=engine.get("disable_plugins", ()))
    if name is None:
        for known, about in listed(manager).items():
            click.echo(f"{known:<12} {about}")
        return 0
    sampling_params(sampling)  # refuses wrong values before a model is loaded
    job = made(manager, name, _options(options, pairs))
    given = list(_texts(texts, files))
    if not given:
        raise click.UsageError("No text: give arguments, --file, or text on standard input.")
    with open_llm(engine) as llm:
        base = llm.get_default_sampling_params()
        params = sampling_params({"max_tokens": NO_LIMIT, **sampling}, base)
        results = run(llm, job, given, sampling_params=params, max_repairs=max_repairs)
    for result in results:
        shown = result.as_dict() if steps else result.value
        click.echo(json.dumps(shown, ensure_ascii=False))
        for problem in result.problems:
            click.echo(f"problem: {problem}", err=True)
    return 0 if all(result.valid for result in results) else 1


def _options(file: IO[str] | None, pairs: Sequence[str]) -> dict[str, Any]:
    """The file's, with the pairs in their place."""
    found: dict[str, Any] = {}
    if file is not None:
        given = as_json(file.read(), file.name)
        if not isinstance(given, dict):
            raise click.BadParameter("it holds no object", param_hint="--options")
        found.update(given)
    for pair in pairs:
        key, mark, value = pair.partition("=")
        if not mark:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--option")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = as_text(value, f"option {key}")
    return found


def _texts(texts: Sequence[str], files: Sequence[IO[str]]) -> Iterator[str]:
    for number, text in enumerate(texts, 1):
        yield as_text(text, f"text {number}")
    for file in files:
        yield as_text(file.read(), file.name)
    if not texts and not files and not sys.stdin.isatty():
        text = as_text(standard_input().read(), "standard input")
        if text.strip():
            yield text
