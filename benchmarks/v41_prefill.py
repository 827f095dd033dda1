"""Prefill time of DeepSeek-V4.1 under each truncation mode, and what the skipped layers explain.

    python benchmarks/v41_prefill.py [--lengths 4096 16384 65536] [--json PATH]

A tiny random model on one thread: 12 layers, 6 of them behind the last KV source or it itself.
Times are CPU seconds of the process, so that a busy machine does not blur them. Two expectations
stand beside the measured ratio of each mode to ``off``. By layers: those before the last KV source
over all; every layer costs the same there, and that one nothing. By ops: what ``off`` spent, less
what it spent on rows that the mode does not run, op by op.

The part that grows with the square of the length is the indexer, so its floor is shown too:
multiply-adds of index queries with keys that they see, over the rate of a large product.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

import torch
from deepinfer import LLM, SamplingParams
from v41_common import LAYERS, Clock, machine, matmul_rate, read_config, write_model

MODES = ("off", "compact", "exact")
A_LAYER = {
    "hyper_open": 2,
    "hyper_merge": 2,
    "latent_attention_block": 1,
    "scaled_moe_block": 1,
    "latent_attention": 1,
}
WISH = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def engine(model: str, mode: str, keep: int, longest: int) -> LLM:
    return LLM(
        model,
        max_num_seqs=1,
        max_model_len=longest + 16,
        yoco_prefill_truncation_mode=mode,
        yoco_prefill_keep_tokens=keep,
        enable_prefix_caching=False,
        num_threads=1,
    )


def prefill(llm: LLM, length: int) -> tuple[float, float, Clock]:
    """(CPU seconds, seconds, ops) of one prompt and its first token."""
    ops, draw = llm.assembly.executor.call("ops")[0], random.Random(length)
    ids = [draw.randrange(64, 448) for _ in range(length)]
    with Clock(ops, (*A_LAYER, "select_sparse")) as clock:
        cpu, wall = time.process_time(), time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, WISH)
        return time.process_time() - cpu, time.perf_counter() - wall, clock


def skipped(clock: Clock, config, share: float) -> float:
    """Seconds that a run of every row spent on a ``share`` of the rows of layers after the keys of
    the last KV source: its own attention and experts, and all of the later layers.
    """
    last, total = config.last_source, 0.0
    for name, each in A_LAYER.items():
        for number, seconds in enumerate(clock.calls[name]):
            layer, part = number // each % LAYERS, number % each
            behind = layer > last and name != "latent_attention"  # it lies inside its block
            own = name not in ("latent_attention_block", "hyper_open") or (
                name == "hyper_open" and part == 1
            )
            total += seconds if behind or (layer == last and own) else 0.0
    sources = config.index_sources
    for number, seconds in enumerate(clock.calls["select_sparse"]):
        total += seconds if sources[number % len(sources)] == last else 0.0
    return total * share


def multiply_adds(config, length: int, first: int = 0) -> int:
    """Of index scores, for rows of a prompt: all, or behind the last source from ``first`` on."""
    total = 0
    for source in config.index_sources:
        ratio, begin = config.ratios[source], first if source >= config.last_source else 0
        block, kept = config.block_size(source), config.candidates[1].kept
        most = block * kept if block else length
        total += sum(min((p + 1) // ratio, most) for p in range(begin, length))
    return total * config.index_heads * config.index_dim


def measure(model: str, lengths: list[int], keep: int, tokens: int) -> list[dict[str, object]]:
    """Modes in turn, short prompts several times, together ``tokens``; the least time stands."""
    best: dict[tuple[int, str], tuple[float, float, Clock]] = {}
    config = read_config(model)
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(engine(model, mode, keep, max(lengths))) for mode in MODES
        }
        cuts = {mode: llm.assembly.facts.kv.truncation for mode, llm in engines.items()}
        for llm in engines.values():
            prefill(llm, 600)  # warms up
        for length in lengths:
            for _ in range(max(1, tokens // length)):
                for mode, llm in engines.items():
                    found = prefill(llm, length)
                    before = best.get((length, mode), found)
                    best[length, mode] = min(before, found, key=itemgetter(0))
                    print(f"  {mode} {length}: {found[0]:.2f} s", flush=True)
    rate = matmul_rate()
    kept = {mode: None if cut is None else cut.keep for mode, cut in cuts.items()}
    return [row(best, at, kept[at[1]], config, rate) for at in best]


def row(best, at: tuple[int, str], keep: int | None, config, rate: float) -> dict[str, object]:
    """One length under one mode, beside ``off``."""
    length, mode = at
    cpu, wall, clock = best[at]
    off, _, profile = best[length, "off"]
    floor = 0 if keep is None else max(0, length - keep)
    adds = multiply_adds(config, length, floor)
    found = {
        "tokens": length,
        "mode": mode,
        "rows kept": length - floor,
        "cpu seconds": round(cpu, 3),
        "seconds": round(wall, 3),
        "ratio": round(cpu / off, 3),
        "by layers": round(1 - (1 - config.last_source / LAYERS) * floor / length, 3),
        "by ops": round(1 - skipped(profile, config, floor / length) / off, 3),
        "select_sparse": round(clock.seconds("select_sparse"), 3),
        "latent_attention": round(clock.seconds("latent_attention"), 3),
        "scaled_moe_block": round(clock.seconds("scaled_moe_block"), 3),
        "index multiply-adds": adds,
        "index floor": round(adds / rate, 3),
    }
    found["index over floor"] = round(found["select_sparse"] / found["index floor"], 2)
    return found


def show(rows: list[dict[str, object]]) -> None:
    names = [n for n in rows[0] if n != "index multiply-adds"]
    print("  ".join(names))
    for found in sorted(rows, key=lambda r: (r["tokens"], MODES.index(r["mode"]))):
        print("  ".join(f"{found[n]!s:>{len(n)}}" for n in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--keep", type=int, default=32, help="rows that compact keeps")
    parser.add_argument("--tokens", type=int, default=65536, help="to run of each length")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    with tempfile.TemporaryDirectory(prefix="v41-") as folder:
        model = write_model(Path(folder), max(args.lengths) + 64)
        rows = measure(model, args.lengths, args.keep, args.tokens)
    show(rows)
    if args.json:
        made = {"machine": about, "keep": args.keep, "layers": LAYERS, "rows": rows}
        args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
