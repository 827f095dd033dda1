"""``deepinfer verify``: ``determinism`` reruns a workload under many conditions and compares bits;
``speculation`` with and without drafts.
"""

from __future__ import annotations

import json
from typing import Any

import click

from deepinfer.cli.options import doing, fetch_demo


@click.group()
def verify() -> None:
    """Check promises on this machine."""


@verify.command()
@click.option("-m", "--model", default="demo", show_default=True)
@click.option("--tokenizer")
@click.option("--backend")
@click.option("--device", type=click.Choice(["cpu", "cuda", "npu"]))
@click.option("--quantization", type=click.Choice(["int8", "fp8"]))
@click.option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto")
@click.option("--threads", "num_threads", type=int)
@click.option(
    "--requests",
    type=click.IntRange(8),
    multiple=True,
    help="Instead of all conditions: among so many at once. May be given several times.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["float32", "bfloat16"]),
    multiple=True,
    default=("float32",),
    show_default=True,
    help="May be given twice.",
)
@click.option("--batch-invariant/--no-batch-invariant", default=True, show_default=True)
@click.option("--self-test", is_flag=True, help="Plant faults; they must be found and named.")
@click.option("--json", "as_json", is_flag=True)
def determinism(
    dtypes: tuple[str, ...],
    requests: tuple[int, ...],
    batch_invariant: bool,
    self_test: bool,
    as_json: bool,
    **engine: Any,
) -> int:
    """Run alone, crowded, permuted, in small chunks, with cold and warm cache, preempted, without
    overlap; compare ids and logprobs bitwise. Where they differ, name the first op.

    Leaves with 0 if all is equal (with --self-test: if every planted fault was caught), else 1.
    """
    from deepinfer.config import EngineConfig

    configs = [
        EngineConfig.make(**engine, dtype=dtype, batch_invariant=batch_invariant)
        for dtype in dtypes
    ]
    fetch_demo(configs[0].model)
    if self_test and requests:
        raise click.UsageError("--requests and --self-test do not go together.")
    lines = [
        line
        for config in configs
        for line in (
            _self_test(config, as_json) if self_test else _verify(config, requests, as_json)
        )
    ]
    if as_json:
        click.echo(json.dumps(lines))
    return 0 if all(line["ok"] for line in lines) else 1


@verify.command()
@click.option("-m", "--model", default="demo", show_default=True)
@click.option("--tokenizer")
@click.option("--speculative", default="ngram", show_default=True, help="What to draft with.")
@click.option("--backend")
@click.option("--device", type=click.Choice(["cpu", "cuda", "npu"]))
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto")
@click.option("--quantization", type=click.Choice(["int8"]))
@click.option("--threads", "num_threads", type=int)
@click.option("--batch-invariant/--no-batch-invariant", default=True, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=48, show_default=True, help="A request.")
@click.option(
    "--max-num-seqs",
    type=int,
    help="Requests that run at once; usual: all 12. 1 shows what a single stream gains.",
)
@click.option("--json", "as_json", is_flag=True)
def speculation(tokens: int, as_json: bool, **engine: Any) -> int:
    """Run a workload without drafts and with them, in static, cap and adaptive; compare ids.

    Says what of the drafts stood, by position, how well confidences fit, and what it saved or
    cost. Leaves with 0 if all ids are equal, else 1.
    """
    from dataclasses import asdict

    from deepinfer.config import EngineConfig
    from deepinfer.testing.speculation import verify as check

    config = EngineConfig.make(**{k: v for k, v in engine.items() if v is not None})
    fetch_demo(config.model)
    with doing("loading the model") as tell:
        reports = check(config, tokens, tell=tell)
    if as_json:
        lines = [{**asdict(r), "ok": r.ok, "accepted_length": r.accepted_length} for r in reports]
        click.echo(json.dumps(lines))
    else:
        for report in reports:
            click.secho("\n".join(report.lines()), fg="green" if report.ok else "red")
    return 0 if all(report.ok for report in reports) else 1


def _verify(config: Any, requests: tuple[int, ...], quiet: bool) -> list[dict[str, Any]]:
    from deepinfer.testing.determinism import verify as check
    from deepinfer.testing.lab import among

    some = {"conditions": [among(count) for count in requests]} if requests else {}
    with doing("loading the model") as tell:
        report = check(config, tell=tell, **some)
    if not quiet:
        click.secho(report.table(), fg="green" if report.ok else "red")
        click.echo("equal under every condition" if report.ok else "NOT deterministic")
    return [
        {"what": report.title, "condition": f.condition, "ok": f.ok, "finding": str(f)}
        for f in report.findings
    ]


def _self_test(config: Any, quiet: bool) -> list[dict[str, Any]]:
    from deepinfer.testing.determinism import caught
    from deepinfer.testing.determinism import self_test as check

    with doing("loading the model") as tell:
        findings = check(config, tell=tell)
    rows = [
        {"what": f"a fault in {op}", "ok": caught(op, finding), "finding": str(finding)}
        for op, finding in findings.items()
    ]
    for row in rows if not quiet else ():
        verdict = "caught" if row["ok"] else "MISSED"
        click.secho(
            f"{row['what']} ({config.dtype}): {verdict}: {row['finding']}",
            fg="green" if row["ok"] else "red",
        )
    return rows
