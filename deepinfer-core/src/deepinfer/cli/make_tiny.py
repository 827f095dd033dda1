"""``deepinfer make-tiny deepseek-v41 PATH``: a random checkpoint in a family's released format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

WITHOUT_ASKING = 2 << 30
"""Bytes of weights that are written without ``--yes``: a layer of full width has 7 GB."""


@click.command(name="make-tiny")
@click.argument("family", type=click.Choice(["deepseek-v41"]))
@click.argument("path", type=click.Path(file_okay=False))
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False),
    help="A JSON file with fields of config.json to set on top, nested as they are there.",
)
@click.option("--layers", type=click.IntRange(1, 40), help="With --full-width: how many layers.")
@click.option(
    "--full-width",
    is_flag=True,
    help="Layers of the released widths (hidden 5120, 384 experts) instead of tiny ones.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="Files.")
@click.option("--device", default="cpu", show_default=True, help="Where the values are drawn.")
@click.option("--yes", is_flag=True, help=f"Also write more than {WITHOUT_ASKING >> 30} GiB.")
def make_tiny(
    family: str,
    path: str,
    file: str | None,
    layers: int | None,
    full_width: bool,
    seed: int,
    shards: int,
    device: str,
    yes: bool,
) -> None:
    """Write a random checkpoint of FAMILY into PATH, a new or empty folder.

    It has the released tensor names, storage types and file layout, and a tokenizer of a few
    hundred pieces. Layers of full width are large: kernel work makes them on the device instead,
    with deepinfer.testing.tiny_v41.full_width_layer.
    """
    if (layers is not None) != full_width:
        raise click.UsageError("--layers and --full-width go together.")
    directory = Path(path)
    if directory.exists() and any(directory.iterdir()):
        raise click.ClickException(f"{path} is not empty; nothing was written.")
    from deepinfer.testing.tiny_v41 import check_config, size_of, write_checkpoint
    from deepinfer.testing.v41_config import full_width_config, tiny_v41_config

    overrides = {} if file is None else _read(file)
    if layers is None:
        config = tiny_v41_config(overrides)
    else:
        config = full_width_config(layers, overrides)
    check_config(config)
    size = size_of(config)
    if size > WITHOUT_ASKING and not yes:
        raise click.ClickException(
            f"This would write {size / 2**30:.1f} GiB, more than {WITHOUT_ASKING >> 30} GiB: add "
            "--yes. To have such a layer on a device without storing it, call "
            "deepinfer.testing.tiny_v41.full_width_layer."
        )
    written = write_checkpoint(directory, config, seed, shards=shards, device=device)
    total = sum(entry.stat().st_size for entry in written.iterdir())
    click.echo(f"{path}: {total / 2**20:.1f} MiB in {len(list(written.iterdir()))} files.")


def _read(file: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        raise click.ClickException(f"{file} is no JSON: {why}") from why
    if not isinstance(value, dict):
        raise click.ClickException(f"{file} does not hold a JSON object.")
    return value
