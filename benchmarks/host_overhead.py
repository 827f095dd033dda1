"""Host time of a step on the scripted device: planning, collecting, output.

    python benchmarks/host_overhead.py [--rows 1 8 64 256] [--steps 200] [--repeats 5]

Decode in its steady state: n requests that all run, no draft, no mask. The device here answers at
once and in place, and its own time is not counted. Times are CPU time of the driving thread, so
that a busy machine does not blur them. Reported: the median over interleaved repeats of the mean
milliseconds a step. Goal at 64 rows: 0.4 ms, limit 1 ms; linear in rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import Future

import numpy as np
from deepinfer.api.plan import Request, StepOutput
from deepinfer.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.logits import to_row_params
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.fake import FakeExecutor, FakeScript
from deepinfer.testing.toy import ToyTokenizer

PROMPT = tuple(range(1, 33))


class InstantExecutor(FakeExecutor):
    """Counts rows and answers with letters: no model at all."""

    def forward(self, plan):
        self.emits = plan.rows.array[:, 3].astype(np.int32)

    def sample(self, step, inputs):
        answer = Future()
        tokens = 1 + (np.arange(len(self.emits), dtype=np.int32)[:, None] + step) % 6
        answer.set_result(StepOutput(step, tokens, self.emits))
        return answer


def build(rows: int, steps: int, detokenize: bool) -> Engine:
    """An engine with ``rows`` requests that decode."""
    length = len(PROMPT) + steps + 64
    script = FakeScript(
        vocab_size=1024,
        page_size=16,
        num_pages=rows * (length // 16 + 1),
        max_model_len=length,
        max_num_seqs=rows,
    )
    executor = InstantExecutor(script)
    config = EngineConfig(model="toy", max_num_seqs=rows, max_num_batched_tokens=8192)
    facts, tokenizer = executor.start(), ToyTokenizer()
    engine = Engine(config, executor, facts, tokenizer=tokenizer, clock=time.thread_time)
    sampling = SamplingParams(
        temperature=0.8, max_tokens=length - len(PROMPT), ignore_eos=True, detokenize=detokenize
    )
    row = to_row_params(sampling, len(PROMPT), {0}, 1024, None)
    for i in range(rows):
        prompt = (100 + i, *PROMPT[1:])
        engine.add(Request(f"r{i}", prompt, sampling, row, seed=i, limit=length))
    return engine


def measure(rows: int, steps: int, detokenize: bool) -> dict[str, float]:
    """Mean milliseconds a step over a steady run."""
    engine = build(rows, steps, detokenize)
    for _ in range(20):
        engine.step()
    plan = collect = output = wait = 0.0
    begin = time.thread_time()
    for _ in range(steps):
        engine.step()
        stats = engine.stats
        assert stats.decode_rows == rows, stats
        plan += stats.plan_seconds
        output += stats.output_seconds
        collect += stats.collect_seconds
        wait += stats.wait_seconds
    whole = time.thread_time() - begin
    engine.close()
    parts = {"plan": plan, "collect": collect, "output": output}
    found = {name: 1000 * seconds / steps for name, seconds in parts.items()}
    return {**found, "sum": sum(found.values()), "step": 1000 * (whole - wait) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    cases = [(rows, text) for text in (False, True) for rows in args.rows]
    runs = {case: [] for case in cases}
    for _ in range(args.repeats):
        for rows, text in cases:
            runs[rows, text].append(measure(rows, args.steps, text))
    if not args.json:
        print("ms a step     rows    plan  collect  output     sum  whole step, device included")
    for (rows, text), found in runs.items():
        row = {key: round(statistics.median(run[key] for run in found), 4) for key in found[0]}
        if args.json:
            print(json.dumps({"rows": rows, "detokenize": text, **row}))
        else:
            name = "with text" if text else "ids only"
            print(f"{name:12} {rows:5}", *(f"{value:8.3f}" for value in row.values()))


if __name__ == "__main__":
    main()
