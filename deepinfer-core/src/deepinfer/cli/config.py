"""``deepinfer config``: what an engine would run with, and what its memory would hold."""

from __future__ import annotations

import json
from typing import Any

import click

from deepinfer.cli.options import engine_config, engine_options


@click.group()
def config() -> None:
    """Show settings; estimate memory."""


@config.command()
@click.option("--json", "as_json", is_flag=True)
@engine_options
@click.pass_context
def show(ctx: click.Context, as_json: bool, engine: dict[str, Any]) -> None:
    """Effective engine arguments and DEEPINFER_* variables, each with its source."""
    rows = [*_arguments(ctx, engine), *_variables()]
    if as_json:
        click.echo(
            json.dumps([dict(zip(("name", "value", "source"), r, strict=True)) for r in rows])
        )
        return
    width = max(len(name) for name, _, _ in rows)
    for name, value, source in rows:
        click.echo(f"{name:<{width}}  {value!s:<12}  {source}")


def _arguments(ctx: click.Context, engine: dict[str, Any]) -> list[tuple[str, Any, str]]:
    from deepinfer.config import EngineConfig

    made = engine_config(engine)
    typed = click.core.ParameterSource.COMMANDLINE
    given = {k for k in ctx.params if ctx.get_parameter_source(k) is typed}
    given = {"seed" if k == "engine_seed" else k for k in given}
    rows = []
    for name, field in EngineConfig.model_fields.items():
        value = getattr(made, name)
        if name in given:
            source = "option"
        elif name != "model" and value != field.get_default(call_default_factory=True):
            source = "environment"
        else:
            source = "default"
        rows.append((name, value, source))
    return rows


def _variables() -> list[tuple[str, Any, str]]:
    from deepinfer import settings

    rows = []
    for name, setting in settings.SETTINGS.items():
        source = "environment" if settings.is_set(name) else "default"
        rows.append((name, settings.read(name), f"{source}, used by {setting.used_by}"))
    return rows + [("", sentence, "environment") for sentence in settings.unknown()]


@config.command()
@click.argument("model", default="demo")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--kv-cache-memory", default="1GiB", show_default=True, help="Bytes of KV.")
@click.option("--page-size", type=int, default=16, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def memory(model: str, dtype: str, kv_cache_memory: str, page_size: int, as_json: bool) -> None:
    """Bytes per token, pages and weights of MODEL, from its header alone."""
    facts = memory_facts(model, dtype, kv_cache_memory, page_size)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        click.echo(f"{name.replace('_', ' '):<24} {shown}")


def memory_facts(model: str, dtype: str, kv_memory: str, page_size: int) -> dict[str, Any]:
    """What ``config memory`` prints. Reads no weights."""
    from math import prod

    from deepinfer.api.kv import KVOptions
    from deepinfer.config import EngineConfig
    from deepinfer.models.checkpoint import open_checkpoint
    from deepinfer.models.source import resolve
    from deepinfer.plugins import PluginManager, Wanted

    made = EngineConfig.make(model=model, kv_cache_memory=kv_memory, page_size=page_size)
    checkpoint = open_checkpoint(resolve(made.model))
    wanted = Wanted.by(made, checkpoint.config.get("architectures") or ())
    adapter = PluginManager().resolve(wanted, made).load("model")()
    shape = adapter.config(checkpoint.config)
    width = {"float32": 4, "bfloat16": 2}[dtype]
    spec = adapter.kv_spec(shape, KVOptions(dtype_bytes=width, page_size=page_size))
    weights = sum(prod(s) for rule in adapter.weights(shape) for s in rule.shapes)
    per_page = spec.bytes_per_token * page_size
    assert made.kv_cache_memory is not None
    pages = made.kv_cache_memory // per_page
    return {
        "model": model,
        "dtype": dtype,
        "weight_bytes": weights * width,
        "kv_bytes_per_token": spec.bytes_per_token,
        "page_size": page_size,
        "page_bytes": per_page,
        "kv_cache_bytes": made.kv_cache_memory,
        "pages": pages,
        "tokens": pages * page_size,
        "max_model_len": checkpoint.config.get("max_position_embeddings"),
    }
