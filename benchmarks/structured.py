"""What structured output costs: masks beside steps, throughput, time to the first token.

    python benchmarks/structured.py --json benchmarks/results/structured.json

Pairs of runs alternate, constrained and free, with the same prompts and the same number of tokens,
so that what else the machine does falls on both. Wall time is what users feel; processor time of
this process is what a busy machine cannot distort much. ``load`` is the load average beside the
number of processors: with more load than processors, go by processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import version

from deepinfer import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["good", "bad", "mixed"]},
    },
    "required": ["name", "age", "mood"],
}
PROMPT = "Describe person number {} of the village as JSON: "
RULE = {"schema_type": "json", "schema": SCHEMA}


class Steps:
    """An observer: seconds of masks and of the device, per decoding step of a full batch."""

    def __init__(self, batch: int) -> None:
        self.batch, self.masks, self.device = batch, [], []

    def on_step(self, stats) -> None:
        if stats.decode_rows >= self.batch and not stats.prefill_tokens:
            self.masks.append(stats.mask_seconds)
            self.device.append(stats.device_seconds)

    def on_finish(self, delta) -> None:
        pass


def quantiles(values: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(values)
    pick = {"p50": 0.5, "p99": 0.99}
    return {k: round(1e3 * ordered[int(q * (len(ordered) - 1))], 4) for k, q in pick.items()}


def watched(llm: LLM, batch: int, work) -> Steps:
    """Steps while ``work`` runs."""
    steps = Steps(batch)
    observers = llm.assembly.engine._recorder._observers
    observers.append(steps)
    try:
        work()
    finally:
        observers.remove(steps)
    return steps


def masks(llm: LLM, batch: int) -> dict[str, object]:
    """Mask time of a step and of a row, beside the device's time of the same steps."""
    # A free array of strings keeps every row busy until its limit.
    rule = {"schema_type": "json", "schema": {"type": "array", "items": {"type": "string"}}}
    params = [
        SamplingParams(so_args=rule, max_tokens=24, temperature=1.0, seed=i) for i in range(batch)
    ]
    prompts = [PROMPT.format(i) for i in range(batch)]
    llm.generate(prompts[:1], params[:1])
    steps = watched(llm, max(1, batch // 2), lambda: llm.generate(prompts, params))
    return {
        "batch": batch,
        "steps": len(steps.masks),
        "mask_ms_per_step": quantiles(steps.masks),
        "mask_ms_per_row": quantiles([seconds / batch for seconds in steps.masks]),
        "device_ms_per_step": quantiles(steps.device),
    }


def throughput(llm: LLM, requests: int, pairs: int) -> dict[str, object]:
    """Tokens a second at batch 16, constrained and free, the same lengths for both."""
    prompts = [PROMPT.format(i) for i in range(requests)]

    def constrained():
        params = [
            SamplingParams(so_args=RULE, max_tokens=64, temperature=1.0, seed=i)
            for i in range(requests)
        ]
        return llm.generate(prompts, params)

    lengths = [len(out.outputs[0].token_ids) for out in constrained()]

    def free():
        params = [
            SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, seed=i)
            for i, n in enumerate(lengths)
        ]
        return llm.generate(prompts, params)

    wall: dict[str, list[float]] = {"constrained": [], "free": []}
    cpu: dict[str, list[float]] = {"constrained": [], "free": []}
    for pair in range(pairs):
        runs = [("constrained", constrained), ("free", free)]
        for name, run in runs if pair % 2 else reversed(runs):
            start, used = time.perf_counter(), time.process_time()
            made = sum(len(out.outputs[0].token_ids) for out in run())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - used)
            assert made == sum(lengths), "the two runs must do the same work"
    return {
        "batch": requests,
        "tokens": sum(lengths),
        "tokens_per_second": {name: round(sum(lengths) / min(s), 1) for name, s in wall.items()},
        "free_to_constrained_wall": ratios(wall),
        "free_to_constrained_processor": ratios(cpu),
    }


def ratios(seconds: dict[str, list[float]]) -> dict[str, object]:
    """Free over constrained: of the best runs, and pair by pair."""
    pairs = [f / c for f, c in zip(seconds["free"], seconds["constrained"], strict=True)]
    return {
        "of_best": round(min(seconds["free"]) / min(seconds["constrained"]), 3),
        "median": round(statistics.median(pairs), 3),
        "pairs": [round(ratio, 3) for ratio in pairs],
    }


def first_token(llm: LLM, pairs: int) -> dict[str, object]:
    """Milliseconds from arrival to the first token, with a compiled grammar and without one."""
    wishes = {
        "constrained": SamplingParams(so_args=RULE, max_tokens=2, temperature=0.0),
        "free": SamplingParams(max_tokens=2, temperature=0.0),
    }
    prompt = PROMPT.format(0)
    found: dict[str, list[float]] = {"constrained": [], "free": []}
    work: dict[str, list[float]] = {"constrained": [], "free": []}
    for wish in wishes.values():
        llm.generate(prompt, wish)
    for pair in range(pairs):
        for name in sorted(wishes, reverse=pair % 2 == 0):
            start, used = time.perf_counter(), time.process_time()
            # From the call: the check of the spec is part of what the grammar costs.
            params = SamplingParams(**wishes[name].model_dump(exclude_unset=True, by_alias=True))
            metrics = llm.generate(prompt, params)[0].metrics
            total = time.perf_counter() - start
            assert metrics.first_token is not None and metrics.finished is not None
            found[name].append(total - (metrics.finished - metrics.first_token))
            work[name].append(time.process_time() - used)
    medians = {name: 1e3 * statistics.median(values) for name, values in found.items()}
    added = [c - f for c, f in zip(found["constrained"], found["free"], strict=True)]
    spent = [c - f for c, f in zip(work["constrained"], work["free"], strict=True)]
    return {
        "pairs": pairs,
        "median_ms": {name: round(value, 3) for name, value in medians.items()},
        "added_ms_median_of_pairs": round(1e3 * statistics.median(added), 3),
        "added_processor_ms_of_two_tokens": round(1e3 * statistics.median(spent), 3),
    }


def main() -> None:
    """All parts; prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    args = parser.parse_args()
    before = os.getloadavg()[0]
    figures: dict[str, object] = {
        "model": "demo (SmolLM2-135M-Instruct, CPU)",
        "versions": {name: version(name) for name in ("deepinfer-core", "xgrammar", "torch")},
        "machine": {"processors": os.cpu_count(), "architecture": platform.machine()},
    }
    with LLM("demo", max_model_len=256, max_num_seqs=64) as llm:
        figures["masks"] = [masks(llm, batch) for batch in args.batches]
        figures["first_token"] = first_token(llm, args.pairs * 10)
    with LLM("demo", max_model_len=256, max_num_seqs=16) as llm:
        figures["throughput"] = throughput(llm, 16, args.pairs)
    figures["load"] = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
