"""Memory of DeepSeek-V4.1's caches, and a decode step's time against the length of its text.

    python benchmarks/v41_memory.py [--lengths 1024 16384 131072] [--json PATH]

A tiny random model on one thread (``v41_common``). First: the bytes a token and a request that
``deepinfer config memory`` reports, and those of the pool that an engine of that length allocates.
Then: caches filled with random valid entries, as if so long a text had run, and one request that
decodes. Specification 9: what grows is the indexer's scores, one for each entry of two sources;
attention reads a window and the chosen entries, however long the text. CPU seconds of the step's
thread, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from deepinfer.api.plan import DECODE, Admit, BatchPlan, RowBlock, RowParams
from deepinfer.cli.config import memory_facts
from deepinfer.config import EngineConfig
from deepinfer.models.checkpoint import open_checkpoint
from deepinfer.models.source import resolve
from deepinfer.plugins import PluginManager, Wanted
from deepinfer.worker.host import Host
from v41_common import Clock, machine, read_config, write_model

KINDS = {"window": "fp8", "compressed": "nvfp4", "index": "mxfp4"}
WATCHED = ("select_sparse", "latent_attention", "scaled_moe_block", "hyper_open")
NO_PAGES = np.zeros((0, 3), np.int32)


def reported(model: str, cache_dtype: str) -> dict[str, object]:
    """What ``deepinfer config memory`` says."""
    return memory_facts(
        model,
        dtype="float32",
        kv_cache_memory="1GiB",
        kv_cache_dtype=cache_dtype,
        max_num_seqs=1,
    )


@contextmanager
def opened(model: str, length: int, cache_dtype: str = "packed"):
    """An engine's hands with room for one text of ``length``, and exactly that."""
    asked = {"model": model, "max_num_seqs": 1, "max_model_len": length}
    asked |= {"kv_cache_dtype": cache_dtype, "enable_prefix_caching": False, "num_threads": 1}
    each = reported(model, cache_dtype)
    memory = each["kv_bytes_per_request"] + length // 16 * each["page_bytes"]
    config = EngineConfig.make(**asked, kv_cache_memory=memory, yoco_prefill_truncation_mode="off")
    architectures = open_checkpoint(resolve(model)).config["architectures"]
    host = Host.open(config, PluginManager().resolve(Wanted.by(config, architectures), config))
    try:
        yield host
    finally:
        host.close()


def fill(host: Host, config) -> None:
    """Random valid entries everywhere: records of random vectors, or their values."""
    ops, draw = host.call("ops"), torch.Generator().manual_seed(0)
    for group in host.facts.kv.groups:
        kind = KINDS.get(group.name.split("-")[0])
        width = config.index_dim if kind == "mxfp4" else config.head_dim
        for layer in group.layers:
            cache = host.kv.tensor(group.name, layer)
            for part in cache.flatten(0, 1).split(1 << 16):
                if kind is None:
                    part.copy_(torch.randn(part.shape, generator=draw))
                    continue
                x = torch.randn((len(part), width), generator=draw)
                packed = part.dtype == torch.uint8
                part.copy_(ops.pack_rows(x, kind) if packed else ops.quantize(x, kind))


def memory(model: str, tokens: int, cache_dtype: str) -> dict[str, object]:
    """One length: what is reported, and the bytes of the tensors that an engine made."""
    said = reported(model, cache_dtype)
    with opened(model, tokens, cache_dtype) as host:
        groups = host.facts.kv.groups
        growing = sum(
            host.kv.tensor(group.name, layer).nbytes
            for group in groups
            if group.kind != "state"
            for layer in group.layers
        )
        return {
            "tokens": tokens,
            "cache": cache_dtype,
            "reported a token": said["kv_bytes_per_token"],
            "allocated a token": growing / tokens,
            "reported a request": said["kv_bytes_per_request"],
            "allocated a request": host.kv.nbytes - growing,
            "pool": host.call("memory")["kv"],
        }


def plan(step: int, start: int, admits=(), pages=NO_PAGES) -> BatchPlan:
    """One row of slot 0: the token at ``start``, or a decode."""
    rows = RowBlock(np.array([[0, start, 1, 1, 0]], np.int32))
    return BatchPlan(step, tuple(admits), rows, pages)


def decode(host: Host, length: int, steps: int, vocab: int) -> dict[str, object]:
    """Medians of a step at a text of ``length``: its last token enters, then it decodes."""
    draw = np.random.default_rng(length)
    text = draw.integers(64, vocab - 64, length).astype(np.int32)
    admit = Admit(0, text, length + steps + 2, 1, RowParams(length, temperature=0.0))
    count = -(-(length + steps + 2) // 16)
    pages = np.stack((np.zeros(count), np.arange(count), draw.permutation(count)), 1)
    runner, took = host.runner, []
    runner.forward(plan(0, length - 1, [admit], pages.astype(np.int32)))
    runner.sample(0, None).result()
    with Clock(host.call("ops"), WATCHED) as clock:
        for step in range(1, steps + 1):
            began = time.thread_time()
            runner.forward(plan(step, DECODE))
            runner.sample(step, None).result()
            took.append(time.thread_time() - began)
    each = {name: per_step(clock.calls[name], steps) for name in WATCHED}
    return {"tokens": length, "step ms": 1000 * statistics.median(took), **each}


def per_step(calls: list[float], steps: int) -> float:
    """Milliseconds: the median over steps of all calls in one."""
    each = len(calls) // steps
    return 1000 * statistics.median(sum(calls[i : i + each]) for i in range(0, len(calls), each))


def explain(rows: list[dict[str, object]], config) -> None:
    """Scored entries, what one costs, and the step that follows for each length from the ends.

    A filtered source scores as many entries at every length that has more.
    """
    full = [s for s in config.index_sources if not config.block_size(s)]
    for found in rows:
        entries = sum(found["tokens"] // config.ratios[source] for source in full)
        found["entries scored"] = entries
    low, high = rows[0], rows[-1]
    more = high["entries scored"] - low["entries scored"]
    slope = (high["select_sparse"] - low["select_sparse"]) / more if more else 0.0
    for found in rows:
        grown = slope * (found["entries scored"] - low["entries scored"])
        found["ns an entry"] = 1e6 * slope
        found["expected ms"] = low["step ms"] + grown
        found["all else"] = found["step ms"] - found["select_sparse"]


def show(rows: list[dict[str, object]]) -> None:
    print("\n" + "  ".join(rows[0]))
    for row in rows:
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print("  ".join(f"{value!s:>{len(name)}}" for name, value in shown.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 1 << 15, 1 << 18])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1 << 10, 1 << 14, 1 << 17])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    longest = max(*args.lengths, *args.sizes) + 1024
    with tempfile.TemporaryDirectory(prefix="v41-") as folder:
        model = write_model(Path(folder), longest)
        config = read_config(model)
        sizes = [memory(model, n, kind) for kind in ("packed", "bfloat16") for n in args.sizes]
        show(sizes)
        with opened(model, max(args.lengths) + 1024) as host, torch.inference_mode():
            fill(host, config)
            decode(host, 512, 5, config.vocab_size)  # warms up
            lengths = sorted(args.lengths)
            steps = [decode(host, n, args.steps, config.vocab_size) for n in lengths]
    explain(steps, config)
    show(steps)
    if args.json:
        found = {"machine": about, "memory": sizes, "decode": steps}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
