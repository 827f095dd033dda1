"""Runs engines side by side: a process each, the same prompts, rounds in turn.

Where you are: the near side of ``child``. A round gives every engine its turn on each workload, so
a noisy minute hits all of them; what is reported are medians over rounds and ratios to DeepInfer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from deepinfer.benchmarking.workloads import HIGHER_IS_BETTER, UNITS, WORKLOADS, Workload

PEERS: Final = ("transformers", "llama.cpp", "vllm")
_VARIABLES: Final = ("VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_CPU_KVCACHE_SPACE=2")
_CHILD: Final = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine to measure.

    Attributes:
        label: its column.
        engine: a name in ``child.ENGINES``.
        spec: what the child gets: model, hf, gguf, threads, engine arguments.
        python: the interpreter that has it.
    """

    label: str
    engine: str
    spec: Mapping[str, Any]
    python: str = sys.executable


@dataclass(slots=True)
class Result:
    """All measurements: workload → label → values; ``absent`` says why somebody is missing."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def add(self, row: str, label: str, value: float) -> None:
        self.values.setdefault(row, {}).setdefault(label, []).append(value)

    def medians(self) -> dict[str, dict[str, float]]:
        """Row → label → median."""
        return {
            row: {label: statistics.median(values) for label, values in columns.items()}
            for row, columns in self.values.items()
        }

    def ratios(self, base: str) -> dict[str, dict[str, float]]:
        """Row → label → base's median divided by the other's."""
        return {
            row: {o: columns[base] / v for o, v in columns.items() if o != base and v}
            for row, columns in self.medians().items()
            if base in columns
        }

    def to_json(self, base: str) -> dict[str, Any]:
        """For a file."""
        return {
            "medians": self.medians(),
            "ratios": self.ratios(base),
            "values": self.values,
            "absent": self.absent,
            "notes": self.notes,
        }


class Child:
    """One engine's process; a context manager."""

    def __init__(self, contestant: Contestant) -> None:
        self.label, self.engine = contestant.label, contestant.engine
        # Through env(1): variables for the child only, this process's own stay unread.
        variables = [f"OMP_NUM_THREADS={contestant.spec['threads']}", *_VARIABLES]
        engine = [contestant.python, str(_CHILD), contestant.engine, json.dumps(contestant.spec)]
        self._process = subprocess.Popen(
            ["env", *variables, *engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hello = self._read()

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run one workload."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            return {"failed": f"its process ended with code {code}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def run(
    contestants: Sequence[Contestant],
    workloads: Iterable[str],
    rounds: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Measure; those who are absent or fail are noted and left out."""
    result, children = Result(), []
    chosen = [WORKLOADS[name] for name in workloads]
    try:
        for contestant in contestants:
            tell(f"starting {contestant.label}")
            child = Child(contestant)
            children.append(child)
            _greet(child, result)
        alive = [child for child in children if child.label not in result.absent]
        for round_ in range(rounds + 1):  # round 0 warms up
            for work in chosen:
                for child in alive:
                    if child.label not in result.absent and child.engine not in work.without:
                        tell(f"round {round_}/{rounds}: {work.name} on {child.label}")
                        _take_turn(child, work, round_, result)
    finally:
        for child in children:
            child.__exit__(None, None, None)
    return result


def startups(
    contestants: Sequence[Contestant], rounds: int, tell: Callable[[str], None] = lambda _: None
) -> Result:
    """Import and load, a fresh process each time."""
    result = Result()
    for round_ in range(1, rounds + 1):
        for contestant in contestants:
            if contestant.label not in result.absent:
                tell(f"round {round_}/{rounds}: start-up of {contestant.label}")
                with Child(contestant) as child:
                    _greet(child, result)
    return result


def _greet(child: Child, result: Result) -> None:
    hello = child.hello
    if "ready" in hello:
        result.add("startup", child.label, hello["ready"])
        result.notes[child.label] = hello["notes"]
    elif "absent" in hello:
        result.absent[child.label] = f"{hello['absent']} is not installed"
    else:
        result.absent[child.label] = hello.get("failed", "it said nothing")


def _take_turn(child: Child, work: Workload, round_: int, result: Result) -> None:
    vocab = child.hello["vocab"]
    command = {
        "measure": work.measure,
        "prompts": work.prompts(vocab, 2 * round_),
        "again": work.prompts(vocab, 2 * round_ + 1),  # so that no cached prefix helps
        "output": work.output,
    }
    answer = child.ask(command)
    if "value" not in answer:
        result.absent[child.label] = answer.get("failed", "it said nothing")
    elif round_ > 0:
        result.add(work.name, child.label, answer["value"])
        result.add("memory", child.label, answer["peak_mb"])


def table(result: Result, base: str) -> str:
    """For a terminal: medians, and in brackets how many times better ``base`` is."""
    medians, ratios = result.medians(), result.ratios(base)
    labels = list(dict.fromkeys(label for columns in medians.values() for label in columns))
    lines = [f"{'median':<24}" + "".join(f"{label:>22}" for label in labels)]
    for row, columns in medians.items():
        measure = WORKLOADS[row].measure if row in WORKLOADS else row
        cells = [_cell(columns.get(o), ratios.get(row, {}).get(o), measure) for o in labels]
        lines.append(f"{f'{row}, {UNITS[measure]}':<24}" + "".join(f"{c:>22}" for c in cells))
    lines += [f"{label}: left out, {why}" for label, why in result.absent.items()]
    return "\n".join(lines)


def _cell(value: float | None, ratio: float | None, measure: str) -> str:
    if value is None:
        return "–"
    if ratio is None:
        return f"{value:.4g}"
    times = ratio if measure in HIGHER_IS_BETTER else 1 / ratio
    return f"{value:.4g} ({times:.2f}×)"
