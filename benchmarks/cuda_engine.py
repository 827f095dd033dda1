"""The whole engine on a GPU: offline throughput, prefill, and where a decode step's time goes.

    python benchmarks/cuda_engine.py [--page-size N] [--parts offline,prefill,profile] [--json FILE]

Llama-3-8B shapes with dummy weights, greedy, batch-invariant. ``offline``: 256 requests of 512
tokens, 256 out of each. ``prefill``: 32 prompts of 2048 less one, one token out of each.
``profile``: kernels of decode steps at batch 64 and context 1024 by torch's profiler, and how long
the GPU runs none of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import triton
from deepinfer import LLM, SamplingParams

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAW = random.Random(0)


def prompts(count, length):
    return [
        {"prompt_token_ids": [DRAW.randrange(100, 100000) for _ in range(length)]}
        for _ in range(count)
    ]


def greedy(tokens):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def tell(**line):
    print(json.dumps(line), flush=True)
    return line


def timed(llm, asked, tokens):
    began = time.perf_counter()
    outputs = llm.generate(asked, greedy(tokens))
    took = time.perf_counter() - began
    assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
    return took


def offline(llm, rounds=2):
    """Rounds of fresh prompts; in the first graphs are still made."""
    took = [timed(llm, prompts(256, 512), 256) for _ in range(rounds)]
    return tell(part="offline", output_tokens_per_s=[256 * 256 / t for t in took])


def prefill(llm, rounds=2):
    took = [timed(llm, prompts(32, 2047), 1) for _ in range(rounds)]
    return tell(part="prefill", tokens_per_s=[32 * 2047 / t for t in took])


def profile(llm, requests=64, context=1000, seconds=0.25):
    """Kernels of a stretch of decode steps, while another thread waits for their answers."""
    asked = prompts(requests, context)
    thread = threading.Thread(target=timed, args=(llm, asked, 220))
    thread.start()
    time.sleep(requests * context / 40000 + 0.6)  # the prompts are through
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watch:
        time.sleep(seconds)
    thread.join()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        watch.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    return summary([e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")])


def summary(events):
    """Idle share, gaps and kernels of the whole steps among these events."""
    events.sort(key=lambda e: e["ts"])
    marks = [i for i, e in enumerate(events) if e["name"].startswith("choose_kernel")]
    steps = len(marks) - 1
    events = events[marks[0] : marks[-1]]
    end = begin = events[0]["ts"]
    idle, gaps, by = 0.0, [], {}
    for event in events:
        gap = event["ts"] - end
        idle += max(gap, 0.0)
        gaps.append((gap, event["name"][:48]))
        end = max(end, event["ts"] + event["dur"])
        count, total = by.get(event["name"][:64], (0, 0.0))
        by[event["name"][:64]] = count + 1, total + event["dur"]
    kernels = sorted(((d / steps, c / steps, n) for n, (c, d) in by.items()), reverse=True)
    for line in kernels[:16]:
        print("   {:8.1f} µs {:6.1f} × {}".format(*line))
    return tell(
        part="profile",
        steps=steps,
        step_ms=(end - begin) / steps / 1e3,
        idle_share=idle / (end - begin),
        longest_gaps_us=sorted(gaps, reverse=True)[:6],
        kernels_per_step=len(events) / steps,
        small_kernels_us=sum(d for d, c, _ in kernels if c < 20 and d < 60),
    ) | {"kernels": kernels[:16]}


PARTS = {"offline": offline, "prefill": prefill, "profile": profile}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="offline,prefill,profile")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--json")
    args = parser.parse_args()
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "page_size": args.page_size,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE), "utf-8")
        with LLM(folder, load_format="dummy", backend="cuda", dtype="bfloat16",
                 batch_invariant=True, max_num_seqs=256, max_model_len=2048,
                 page_size=args.page_size) as llm:  # fmt: skip
            timed(llm, prompts(1, 64), 2)
            for part in args.parts.split(","):
                result[part] = PARTS[part](llm)
                if args.json:
                    Path(args.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
