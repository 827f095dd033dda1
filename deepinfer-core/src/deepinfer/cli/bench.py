"""``deepinfer bench``: latency, throughput and start-up, alone or beside peers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from deepinfer.cli.options import doing, engine_config, engine_options, fetch_demo
from deepinfer.cli.writing import LineWriter

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _bench_options(command: _Command) -> _Command:
    for option in (
        click.option("--rounds", type=click.IntRange(1), default=3, show_default=True),
        click.option("--peers", is_flag=True, help="Beside every peer that is installed."),
        click.option(
            "--peer",
            "pythons",
            multiple=True,
            metavar="NAME=PYTHON",
            help="A peer (transformers, llama.cpp, vllm) and the interpreter that has it.",
        ),
        click.option(
            "--peer-model",
            type=click.Path(path_type=Path),
            help="A directory with safetensors for peers; made from the model if left out.",
        ),
        click.option(
            "-o", "--output", type=LineWriter, metavar="FILENAME", help="Write json there."
        ),
        click.option("--json", "as_json", is_flag=True, help="Write json, no table."),
    ):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """Measure this engine, and peers on the same prompts in interleaved rounds.

    Each engine runs in a process of its own. Reported are medians, and in brackets how many times
    better DeepInfer is.
    """


@bench.command()
@_bench_options
@engine_options
def latency(**options: Any) -> None:
    """One request: time to the first token of 512, time between tokens."""
    _measure(("first-token", "between-tokens"), **options)


@bench.command()
@_bench_options
@engine_options
def throughput(**options: Any) -> None:
    """32 requests at once: tokens a second; CPU seconds where they share a prefix."""
    _measure(("throughput", "shared-prefix"), **options)


@bench.command(name="all")
@_bench_options
@engine_options
def all_(**options: Any) -> None:
    """Latency and throughput in the same rounds."""
    _measure(("throughput", "first-token", "between-tokens", "shared-prefix"), **options)


@bench.command()
@_bench_options
@engine_options
def startup(**options: Any) -> None:
    """Import and load, in a fresh process each time; DeepInfer's by stage."""
    from deepinfer.benchmarking import harness

    result = _compared(harness.startups, options)
    if not options["as_json"]:
        for stage, seconds in result.notes.get("deepinfer", {}).get("startup", {}).items():
            click.echo(f"  {stage:<32} {seconds:8.3f} s")


def _measure(workloads: Sequence[str], **options: Any) -> None:
    from deepinfer.benchmarking import harness

    def run(contestants: list[Any], rounds: int, tell: Callable[[str], None]) -> Any:
        return harness.run(contestants, workloads, rounds, tell)

    _compared(run, options)


def _compared(measure: Callable[..., Any], options: dict[str, Any]) -> Any:
    """What ``measure`` found, reported where the options want it."""
    output = options["output"]
    with output or contextlib.nullcontext():
        with doing("preparing", log=True) as tell:
            contestants = _contestants(options, tell)
            result = measure(contestants, options["rounds"], tell)
        _report(result, contestants[0].label, output, options["as_json"])
    return result


def _contestants(options: dict[str, Any], tell: Callable[[str], None]) -> list[Any]:
    """DeepInfer first, then the peers that were asked for."""
    from deepinfer.benchmarking.harness import PEERS, Contestant

    engine = dict(options["engine"])
    engine_config(engine)  # refuse nonsense before a process starts
    model, threads = engine.pop("model"), engine.pop("num_threads", 2)
    fetch_demo(model)
    if "engine_seed" in engine:
        engine["seed"] = engine.pop("engine_seed")
    spec = {"model": model, "threads": threads, "engine": engine}
    contestants = [Contestant(label="deepinfer", engine="deepinfer", spec=spec)]
    pythons = dict(_pair(text) for text in options["pythons"])
    names = [name for name in PEERS if options["peers"] or name in pythons]
    if names:
        quantization = engine.get("quantization")
        paths = _peer_files(model, options["peer_model"], names, quantization, tell)
        dtype = engine.get("dtype", "float32")
        peer_spec = {"threads": threads, "dtype": "float32" if dtype == "auto" else dtype, **paths}
        contestants += [
            Contestant(
                label=name, engine=name, spec=peer_spec, python=pythons.get(name, sys.executable)
            )
            for name in names
        ]
    return contestants


def _pair(text: str) -> tuple[str, str]:
    from deepinfer.benchmarking.harness import PEERS

    name, _, python = text.partition("=")
    if name not in PEERS or not python:
        raise click.BadParameter(
            f"{text!r} is not NAME=PYTHON with a name of {', '.join(PEERS)}", param_hint="--peer"
        )
    return name, python


def _peer_files(
    model: str,
    given: Path | None,
    names: Sequence[str],
    quantization: str | None,
    tell: Callable[[str], None],
) -> dict[str, str]:
    """The same weights as files that peers read; beside int8, llama.cpp's Q8_0."""
    from deepinfer.benchmarking.export import as_gguf, as_safetensors

    paths = {"hf": str(given or as_safetensors(model, tell))}
    if "llama.cpp" in names:
        paths["gguf"] = str(as_gguf(model, tell, "Q8_0" if quantization == "int8" else "F32"))
    return paths


def _report(result: Any, base: str, output: LineWriter | None, as_json: bool) -> None:
    from deepinfer.benchmarking.harness import table

    if output is not None or as_json:
        (output or LineWriter("-")).write(json.dumps(result.to_json(base), indent=1))
    if not as_json:
        click.echo(table(result, base))
    if base in result.absent:
        raise click.ClickException(f"{base}: {result.absent[base]}")
