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
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "bfloat16", "packed"]))
@click.option("--page-size", type=int, default=16, show_default=True)
@click.option("--max-num-seqs", type=int, default=256, show_default=True)
@click.option("--max-model-len", type=int, help="Longest text; default: the model's own.")
@click.option("--speculative", help="A draft, whose KV lies in the same pages.")
@click.option("--json", "as_json", is_flag=True)
def memory(model: str, as_json: bool, **engine: Any) -> None:
    """Bytes per token and per request, pages and weights of MODEL, from its header alone."""
    facts = memory_facts(model, **{k: v for k, v in engine.items() if v is not None})
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        if name != "groups":
            click.echo(f"{name.replace('_', ' '):<24} {_shown(value)}")
    click.echo(f"\n{'KV group':<24} {'kind':<8}{'layers':>8}{'a token':>12}{'a request':>14}")
    for group in facts["groups"]:
        per_token, per_request = group["bytes_per_token"], group["bytes_per_request"]
        click.echo(
            f"{group['name']:<24} {group['kind']:<8}{group['layers']:>8}"
            f"{per_token:>12,}{per_request:>14,}"
        )


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def memory_facts(model: str, **engine: Any) -> dict[str, Any]:
    """What ``config memory`` prints: what an engine with these arguments would do with its KV
    memory, by the function that the engine asks (``worker.sizes``). Reads no weights."""
    from math import prod

    from deepinfer.config import EngineConfig
    from deepinfer.entrypoints.speculation import speculator_name
    from deepinfer.models.checkpoint import open_checkpoint
    from deepinfer.models.registry import image_reader, model_config
    from deepinfer.models.source import resolve
    from deepinfer.plugins import PluginManager, Wanted
    from deepinfer.worker.drafting import draft_needs, with_drafts
    from deepinfer.worker.sizes import kv_options, size_kv

    made = EngineConfig.make(model=model, **engine)
    checkpoint = open_checkpoint(resolve(made.model), made.load_format)
    manager = PluginManager()
    speculator = speculator_name(manager, made, checkpoint.config)
    wanted = Wanted.by(made, checkpoint.config.get("architectures") or (), speculator)
    resolution = manager.resolve(wanted, made)
    adapter = resolution.load("model")()
    shape = model_config(adapter, checkpoint)
    width = {"float32": 4, "bfloat16": 2}[made.dtype]
    needs = draft_needs(made, resolution, shape, checkpoint)
    spec = with_drafts(adapter.kv_spec(shape, kv_options(made, width, needs.draft_len)), needs)
    reader = image_reader(adapter, checkpoint.config)
    # Rows of one image wait where a step ends in the middle of it; they lie beside the KV.
    image = 0 if reader is None else reader.most_tokens * shape.hidden_size * width
    weights = sum(prod(s) for rule in adapter.weights(shape) for s in rule.shapes)
    assert made.kv_cache_memory is not None
    longest = made.max_model_len or shape.max_position_embeddings
    sizes = size_kv(made, spec, longest, made.kv_cache_memory)
    return {
        "model": model,
        "dtype": made.dtype,
        "weight_bytes": weights * width + needs.weight_bytes,
        "kv_layout": spec.layout,
        "kv_bytes_per_token": spec.bytes_per_token,
        "kv_bytes_per_request": spec.bytes_per_request,
        "image_bytes_per_request": image,
        "page_size": made.page_size,
        "page_bytes": sizes.page_bytes,
        "kv_cache_bytes": made.kv_cache_memory,
        "kv_bytes_used": sizes.nbytes,
        "pages": sizes.pages,
        "tokens": sizes.pages * made.page_size,
        "slots": sizes.slots,
        "snapshots": sizes.snapshots,
        "max_model_len": sizes.max_len,
        "groups": [
            {
                "name": group.name,
                "kind": group.kind,
                "layers": len(group.layers),
                "bytes_per_token": group.bytes_per_token if group.kind != "state" else 0,
                "bytes_per_request": group.bytes_per_request,
            }
            for group in spec.groups
        ],
    }
