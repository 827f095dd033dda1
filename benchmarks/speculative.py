"""What speculation brings: one stream by task, adaptive against every fixed length, and its price
where it is off.

    python benchmarks/speculative.py --draft OUT/draft --prompts FOLDER --parts single,load,off \
        --minutes 15 --json FILE

``FOLDER`` holds ``*.jsonl`` as training reads them; of each file the prompts that training held out
are taken. Every configuration is an engine of its own, opened once; rounds go over all of them in
changing order, so that what else the machine does falls on all, and every figure is a median of
ratios within a round. Ids are compared with those without speculation. What is known is written
after every round, so a run that is cut has what it had. ``--minutes`` is shared among the parts,
opening and warming included; each ends with the round in which its share is over.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepinfer import LLM, SamplingParams
from deepinfer.testing.speculation import WatchingPlanner
from deepinfer_speculative.train.answers import held_out, read_prompts

TASKS = {"gsm8k": "math", "math500": "math", "humaneval": "code", "mbpp": "code",
         "mt-bench": "chat"}  # fmt: skip
LENGTHS = {"cpu": {1: 128, 4: 64, 16: 48, 64: 48}, "cuda": {}}
"""New tokens of a request at each concurrency; else 128."""
WAVES = {"cpu": {1: 1, 4: 3, 16: 3, 64: 2}, "cuda": {64: 6}}
"""Requests of a run, as a multiple of those at a time; else 8. A run takes about a second."""
WARM = 16
"""New tokens of a request while a load warms up."""
WARM_ROUNDS = {"cpu": 0, "cuda": 4}
"""Rounds that do not count either: graphs of all kinds of steps."""
SURE, LEAD = 2, 0.9
"""Rounds after which a fixed length that never came so near to the best is not run any more."""
OFF = "off"


def prompts_of(folder: Path) -> dict[str, list[str]]:
    """Held-out prompts by task, the files of a task in turn, so that few of them show all."""
    files: dict[str, list[str]] = defaultdict(list)
    for name, prompt in read_prompts(folder):
        if name in TASKS and held_out(prompt) and len(prompt) < 1200:
            files[name].append(prompt)
    found: dict[str, list[str]] = defaultdict(list)
    for turn in range(max(map(len, files.values()), default=0)):
        for name, mine in files.items():
            if turn < len(mine):
                found[TASKS[name]].append(mine[turn])
    return found


class Engines:
    """One open engine for each configuration, by name."""

    def __init__(self, args: argparse.Namespace, names: Sequence[str], seqs: int) -> None:
        self._stack = contextlib.ExitStack()
        self.llms: dict[str, LLM] = {}
        self.watched: dict[str, WatchingPlanner] = {}
        for name in names:
            began = time.perf_counter()
            self.llms[name] = self._stack.enter_context(_open(args, name, seqs))
            scheduler = self.llms[name].assembly.engine.scheduler
            if scheduler.planner is not None:
                self.watched[name] = scheduler.planner = WatchingPlanner(scheduler.planner)
            print(f"  {name} is open after {time.perf_counter() - began:.1f} s", flush=True)

    def close(self) -> None:
        self._stack.close()

    def run(self, name: str, prompts: Sequence[str], params: Sequence[SamplingParams]) -> Run:
        """Answer all at once."""
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
        gc.collect()  # what the others left costs a tenth of a second, whenever it happens
        began = time.perf_counter()
        outs = self.llms[name].chat(talks, list(params))
        seconds = time.perf_counter() - began
        for out in outs:
            if out.error is not None:
                raise out.error
        return Run(seconds, [tuple(out.outputs[0].token_ids) for out in outs])


class Run:
    """Seconds and ids of each request."""

    def __init__(self, seconds: float, ids: list[tuple[int, ...]]) -> None:
        self.seconds, self.ids = seconds, ids
        self.tokens = sum(map(len, ids))


def _open(args: argparse.Namespace, name: str, seqs: int) -> LLM:
    """``off``, ``off:mode``, ``none`` (plugins barred), ``adaptive`` or ``static-K``."""
    speculative: dict[str, Any] | None = None
    barred: list[str] = []
    if name == "none":
        barred = ["deepinfer-speculative"]
    elif name != OFF:
        mode, _, length = name.partition("-")
        speculative = {"model": args.draft, "mode": "off" if mode == "off:mode" else mode}
        speculative |= {"num_speculative_tokens": int(length)} if length else {}
    more = {key: getattr(args, key) for key in ("quantization", "dtype") if getattr(args, key)}
    return LLM(
        args.model, device=args.device, max_num_seqs=seqs, max_model_len=2048, seed=0,
        num_threads=args.threads, kv_cache_memory=args.kv, speculative=speculative,
        disable_plugins=barred, batch_invariant=args.device == "cuda", **more,
    )  # fmt: skip


def turns(names: Sequence[str], until: float, least: int) -> Iterator[tuple[int, list[str]]]:
    """(round, order of the configurations), each time turned by one; at least so many rounds."""
    number = 0
    while number < least or time.monotonic() < until:
        at = number % len(names)
        yield number, [*names[at:], *names[:at]]
        number += 1


def middle(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    ordered = sorted(values)
    low, high = (ordered[int(q * (len(ordered) - 1))] for q in (0.25, 0.75))
    return {
        "median": round(statistics.median(ordered), 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "rounds": len(ordered),
    }


class Report:
    """What is known so far, on disk after every round."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._path = args.json
        self.parts: dict[str, Any] = {
            "setting": {
                "model": args.model,
                "draft": Path(args.draft).name,
                "device": args.device,
                "quantization": args.quantization,
                "dtype": args.dtype,
                "machine": platform.processor() or platform.machine(),
                "processors": os.cpu_count(),
                "torch": torch.__version__,
                "deepinfer": version("deepinfer-core"),
            }
        }

    def put(self, part: str, found: Any) -> None:
        load = [round(x, 2) for x in os.getloadavg()]
        self.parts[part] = {**found, "load": load}
        if self._path:
            Path(self._path).write_text(json.dumps(self.parts, indent=1) + "\n")


def params_for(count: int, tokens: int, heat: float, fill: bool) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=heat, seed=i, max_tokens=tokens, ignore_eos=fill)
        for i in range(count)
    ]


# One stream, by task.


def single(args: argparse.Namespace, report: Report, seconds: float) -> None:
    """Whole answers of one request at a time, at T = 0 and 1."""
    until, tasks = time.monotonic() + seconds, prompts_of(args.prompts)
    names = [OFF, f"static-{args.static}", "adaptive"]
    engines = Engines(args, names, 4)
    try:
        for name in names:  # kernels, costs, caches
            engines.run(name, ["Count to twenty."], params_for(1, 48, 0.0, True))
        watched = {key: _Counts(engines) for key in ((t, h) for t in tasks for h in (0, 1))}
        found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        times: dict[tuple[str, int, str], float] = defaultdict(float)
        parted: list[str] = []
        for number, order in turns(names, until, 1):
            for task, heat in watched:
                prompt = tasks[task][number % len(tasks[task])]
                runs = {}
                for name in order:
                    with watched[task, heat].counting(name):
                        params = params_for(1, args.tokens, float(heat), False)
                        runs[name] = engines.run(name, [prompt], params)
                for name in names:
                    times[task, heat, name] += runs[name].seconds
                    if name != OFF:
                        ratio = runs[OFF].seconds / runs[name].seconds
                        found[task, heat, name].append(ratio)
                        if runs[name].ids != runs[OFF].ids:
                            parted.append(f"{name} {task} T={heat} round {number}")
            report.put("single", _single(names, watched, found, times, parted))
    finally:
        engines.close()
    _show_single(report.parts["single"])


class _Counts:
    """Drafts that ran and stood, by configuration, of the runs within :meth:`counting`."""

    def __init__(self, engines: Engines) -> None:
        self._planners = engines.watched
        self.ran: dict[str, Any] = {}
        self.stood: dict[str, Any] = {}
        self.rounds: dict[str, int] = defaultdict(int)
        self.said: dict[str, list[tuple[float, bool]]] = defaultdict(list)

    @contextlib.contextmanager
    def counting(self, name: str) -> Iterator[None]:
        if name not in self._planners:
            yield
            return
        seen = self._planners[name].seen
        ran, stood, rounds, said = seen.ran.copy(), seen.stood.copy(), seen.rounds, len(seen.said)
        yield
        self.ran[name] = self.ran.get(name, 0) + seen.ran - ran
        self.stood[name] = self.stood.get(name, 0) + seen.stood - stood
        self.rounds[name] += seen.rounds - rounds
        self.said[name] += seen.said[said:]

    def row(self, name: str) -> dict[str, Any]:
        """Accepted length, acceptance of each position given those before, calibration error."""
        ran, stood = self.ran[name].tolist(), self.stood[name].tolist()
        before = [self.rounds[name], *stood]
        return {
            "accepted_length": round(1 + sum(stood) / max(self.rounds[name], 1), 3),
            "verified_a_step": round(sum(ran) / max(self.rounds[name], 1), 2),
            "acceptance": [
                round(s / min(r, b), 3) if min(r, b) else None
                for r, s, b in zip(ran, stood, before, strict=False)
            ],
            "calibration_error": round(_gap(self.said[name]), 4),
        }


def _gap(said: list[tuple[float, bool]], bins: int = 15) -> float:
    """Expected calibration error of the survivals."""
    sums: dict[int, float] = defaultdict(float)
    for p, stood in said:
        sums[min(int(p * bins), bins - 1)] += p - stood
    return sum(map(abs, sums.values())) / max(len(said), 1)


def _single(names: list[str], watched: Any, found: Any, times: Any, parted: list[str]) -> Any:
    rows = []
    for task, heat in watched:
        row: dict[str, Any] = {"task": task, "temperature": heat}
        for name in names[1:]:
            row[name] = {
                "speed_up": middle(found[task, heat, name]),
                "of_all_time": round(times[task, heat, OFF] / times[task, heat, name], 4),
                **watched[task, heat].row(name),
            }
        rows.append(row)
    whole = {
        name: {
            f"T={heat}": round(
                sum(times[t, h, OFF] for t, h in watched if h == heat)
                / sum(times[t, h, name] for t, h in watched if h == heat),
                4,
            )
            for heat in (0, 1)
        }
        for name in names[1:]
    }
    return {"by_task": rows, "speed_up_of_all_time": whole, "ids_differ": parted}


def _show_single(part: dict[str, Any]) -> None:
    print("one stream: speed-up over off (median of rounds), accepted length, acceptance")
    for row in part["by_task"]:
        for name, cell in row.items():
            if isinstance(cell, dict):
                rates = " ".join("-" if a is None else f"{a:.2f}" for a in cell["acceptance"])
                print(
                    f"  {row['task']:5} T={row['temperature']} {name:9} "
                    f"{cell['speed_up']['median']:5.2f} ×  {cell['accepted_length']:.2f}  {rates}"
                    f"  calibration error {cell['calibration_error']:.3f}"
                    f"  ({cell['speed_up']['rounds']} rounds)"
                )
    print(f"  of all time: {part['speed_up_of_all_time']}")
    _say_ids(part)


def _say_ids(part: dict[str, Any]) -> None:
    parted = part["ids_differ"]
    print("  ids: equal" if not parted else f"  ids: DIFFER in {', '.join(parted[:8])}")


# Adaptive against every fixed length, by load.


def load(args: argparse.Namespace, report: Report, seconds: float) -> None:
    """Greedy requests, so many at a time: one that ends makes room for the next, ``WAVES`` times as
    many in all. Prompts are found in the cache.

    Each round has other prompts, the same for all configurations. The first runs warm up: kernels,
    prompts' pages, graphs, and what a planner learns of steps of this size; they do not count.
    """
    every = [p for many in zip(*prompts_of(args.prompts).values(), strict=False) for p in many]
    every = sorted(every, key=len)[:64]
    names = [OFF, *(f"static-{k}" for k in range(1, args.gamma + 1)), "adaptive"]
    found: dict[tuple[int, str], list[float | None]] = defaultdict(list)
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    parted: set[str] = set()
    for c in args.concurrency:
        until = time.monotonic() + seconds / len(args.concurrency)
        engines = Engines(args, names, c)
        count, tokens = c * WAVES[args.device].get(c, 8), LENGTHS[args.device].get(c, 128)
        try:
            for name in names:
                engines.run(name, every, params_for(len(every), 2, 0.0, True))
                engines.run(name, batch(every, 0, c), params_for(c, WARM, 0.0, True))
                for number in range(WARM_ROUNDS[args.device]):
                    asked = batch(every, number * count, count)
                    engines.run(name, asked, params_for(count, tokens, 0.0, True))
            for number, order in turns(names, until, 1):
                asked = batch(every, number * count, count)
                params = params_for(count, tokens, 0.0, True)
                in_race = _in_race(c, names, found)
                runs = {n: engines.run(n, asked, params) for n in order if n in in_race}
                for name in names:
                    run = runs.get(name)
                    found[c, name].append(runs[OFF].seconds / run.seconds if run else None)
                    if run:
                        rates[c, name].append(run.tokens / run.seconds)
                        if run.ids != runs[OFF].ids:
                            parted.add(f"{name} at {c}")
                report.put("load", _load(args.concurrency, names, found, rates, sorted(parted)))
            told = engines.watched["adaptive"].report()
            print("  planner:", {name: round(value, 2) for name, value in told.items()})
        finally:
            engines.close()
    _show_load(report.parts["load"])


def batch(prompts: list[str], start: int, count: int) -> list[str]:
    return [prompts[(start + i) % len(prompts)] for i in range(count)]


def _in_race(c: int, names: list[str], found: Any) -> set[str]:
    """What runs in the next round: off, adaptive, and fixed lengths that may be the best: after
    ``SURE`` rounds, a length that was never within ``LEAD`` of the best one's median is out, and
    its time goes to those that matter.
    """
    fixed = {name: [x for x in found[c, name] if x is not None] for name in names[:-1]}
    if not all(fixed.values()):
        return set(names)
    lead = LEAD * max(statistics.median(x) for x in fixed.values())
    out = {name for name, x in fixed.items() if len(x) >= SURE and max(x) < lead}
    return set(names) - (out - {OFF})


def _load(loads: list[int], names: list[str], found: Any, rates: Any, parted: list[str]) -> Any:
    rows = []
    for c in loads:
        if not found[c, OFF]:
            continue
        ran = {name: [x for x in found[c, name] if x is not None] for name in names}
        best = max(names[:-1], key=lambda name: statistics.median(ran[name]))
        pairs = [
            a / b for a, b in zip(found[c, "adaptive"], found[c, best], strict=True) if a and b
        ]
        rows.append(
            {
                "concurrency": c,
                "tokens_a_second": {n: round(statistics.median(rates[c, n]), 1) for n in names},
                "over_off": {n: middle(ran[n]) for n in names[1:]},
                "best_fixed": best,
                "adaptive_over_best": middle(pairs),
            }
        )
    return {"by_load": rows, "ids_differ": parted}


def _show_load(part: dict[str, Any]) -> None:
    print("load: tokens a second; adaptive over off and over the best fixed length")
    for row in part["by_load"]:
        rates = "  ".join(f"{name} {rate:g}" for name, rate in row["tokens_a_second"].items())
        print(
            f"  {row['concurrency']:3}: {rates}; "
            f"{row['over_off']['adaptive']['median']:.3f} of off, "
            f"{row['adaptive_over_best']['median']:.3f} of {row['best_fixed']} "
            f"({row['adaptive_over_best']['rounds']} rounds)"
        )
    _say_ids(part)


# The plugin, installed and off.


def off(args: argparse.Namespace, report: Report, seconds: float) -> None:
    """The same with the plugin barred, installed, and asked with mode ``off``."""
    until = time.monotonic() + seconds
    names = ["none", OFF, "off:mode"]
    engines = Engines(args, names, 8)
    times: dict[str, list[float]] = defaultdict(list)
    try:
        params = params_for(1, args.tokens, 0.0, True)
        for number, order in turns(names, until, 4):
            for name in order:
                run = engines.run(name, ["Count to twenty."], params)
                if number:  # the first warms up
                    times[name].append(1e3 * run.seconds / run.tokens)
            if number:
                report.put("off", _off(engines, names, times))
    finally:
        engines.close()
    print(f"off: {json.dumps(report.parts['off'])}")


def _off(engines: Engines, names: list[str], times: dict[str, list[float]]) -> dict[str, Any]:
    facts = {name: llm.assembly.facts for name, llm in engines.llms.items()}
    return {
        "ms_a_token": {name: middle(times[name]) for name in names},
        "over_none": {
            name: middle([a / b for a, b in zip(times[name], times["none"], strict=True)])
            for name in names[1:]
        },
        "draft_length": {name: fact.draft_len for name, fact in facts.items()},
        "kv_layout_is_the_same": len({fact.kv.layout for fact in facts.values()}) == 1,
    }


PARTS = {"single": (single, 4.0), "load": (load, 8.0), "off": (off, 1.0)}
"""Each part and its share of the time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="dspark-demo", help="folder or name")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--parts", default="single,load,off")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=128, help="most of an answer (single, off)")
    parser.add_argument("--static", type=int, default=5, help="fixed length of part single")
    parser.add_argument("--gamma", type=int, default=5, help="longest fixed length of part load")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--kv", type=int, default=1 << 30, help="bytes of KV for each engine")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--json")
    args = parser.parse_args()
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    report, shares = Report(args), sum(PARTS[part][1] for part in chosen)
    for part in chosen:
        run, share = PARTS[part]
        print(f"{part}:", flush=True)
        run(args, report, 60 * args.minutes * share / shares)


if __name__ == "__main__":
    main()
