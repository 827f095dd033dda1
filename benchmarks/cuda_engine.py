"""The whole engine on a GPU: offline throughput, prefill, and where a decode step's time goes.

    python benchmarks/cuda_engine.py [--page-size N] [--step-tokens N] [--kv SIZE]
                                     [--parts offline,prefill,profile,modes,host] [--json FILE]

Llama-3-8B shapes with dummy weights, greedy, batch-invariant. ``offline``: 256 requests of 512
tokens, 256 out of each. ``prefill``: 32 prompts of 2048 less one, one token out of each.
``profile``: kernels of decode steps at batch 64 and context 1024 by torch's profiler, and how long
the GPU runs none of them. ``modes``: an engine without invariance beside it, both by turns (needs
``--kv``, so that both fit). ``host``: what makes the host wait inside a step, and a step's time
with a structured request whose mask is ready.
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
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import torch
import triton
from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints import assemble
from deepinfer.worker.runner import ModelRunner

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


def decode_ms(llm, requests=64, context=1000, short=32, long=160):
    """A decode step: two runs that differ by ``long - short`` steps alone."""
    took = [timed(llm, prompts(requests, context), tokens) for tokens in (short, long)]
    return (took[1] - took[0]) / (long - short) * 1e3


def modes(llm, rounds=2):
    """With and without invariance by turns: decode at 64, prefill, a short offline run."""
    found = {True: [], False: []}
    with opened(llm.assembly.config.model, **SETTINGS | {"batch_invariant": False}) as other:
        for engine in (llm, other):
            timed(engine, prompts(64, 512), 24)  # graphs are made
        for _ in range(rounds):
            for invariant, engine in ((True, llm), (False, other)):
                found[invariant].append({
                    "decode_64_ms": decode_ms(engine),
                    "prefill_tokens_per_s": 16 * 2047 / timed(engine, prompts(16, 2047), 1),
                    "offline_64_tokens_per_s": 64 * 64 / timed(engine, prompts(64, 512), 64),
                })  # fmt: skip
    best = {
        name: [median(r[name] for r in found[mode]) for mode in (True, False)]
        for name in found[True][0]
    }
    shares = {name: one / other - 1 for name, (one, other) in best.items()}
    return tell(part="modes", invariant_and_not=best, difference=shares)


class Mask:
    """A matcher that always allows the lower half of the vocabulary, and knows so at once."""

    def __init__(self, words):
        self.words = words

    def fill(self, rows, drafts):
        rows[0] = self.words
        return 0

    def accept(self, tokens):
        return len(tokens)

    def done(self):
        return False

    def fork(self):
        return self

    def unproven(self):
        return False

    def violation(self):
        return None


class Masks:
    """A grammar backend of such matchers: masks cost the host nothing."""

    def __init__(self, vocab):
        words = -(-vocab // 32)
        self.words = np.where(np.arange(words) < words // 2, -1, 0).astype(np.int32)

    def check(self, spec):
        pass

    def ready(self, spec, ends):
        return Mask(self.words)

    def compile(self, spec, ends):
        return Mask(self.words)

    def fill(self, jobs, rows):
        return [job.grammar.fill(rows[job.first :], job.drafts) for job in jobs]

    def close(self):
        pass


@contextmanager
def watched(found):
    """Adds where torch made the host wait inside a step's two halves to ``found``."""
    inside = threading.local()
    halves = ModelRunner.forward, ModelRunner.sample

    def show(message, *args, **kwargs):
        if getattr(inside, "step", False) and "synchroniz" in str(message):
            own = (__file__, warnings.__file__)
            stack = [f for f in traceback.extract_stack() if f.filename not in own]
            frames = [f for f in stack if "deepinfer" in Path(f.filename).parts] or stack
            found.append(f"{Path(frames[-1].filename).name}:{frames[-1].lineno}")

    def half(fn):
        def run(self, *args):
            inside.step = True
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return fn(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                inside.step = False

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")  # says once in a process that it is a prototype
        torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.simplefilter("always")
        ModelRunner.forward, ModelRunner.sample = map(half, halves)
        try:
            yield
        finally:
            ModelRunner.forward, ModelRunner.sample = halves


WISHES = {
    "plain": {},
    "structured": {"so_args": {"schema_type": "json_object"}},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "filters": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "logprobs": {"logprobs": 5},
}


def host(llm, requests=64):
    """Waits in steps whose 64 rows hold 8 of each wish, and a step's time with one such row."""
    waits, step_ms = {}, {}
    for name, wish in WISHES.items():
        some = SamplingParams(**{"temperature": 0, "max_tokens": 48, "ignore_eos": True} | wish)
        asked = prompts(requests, 300)
        who = [some if i % 8 == 0 else greedy(48) for i in range(requests)]
        llm.generate(asked, who)  # graphs and kernels are made
        waits[name] = []
        with watched(waits[name]):
            llm.generate(prompts(requests, 300), who)
    for name in ("plain", "structured", "plain again"):
        wish = WISHES.get(name, {})
        took = []
        for tokens in (32, 160):
            one = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **wish)
            asked, who = prompts(requests, 1000), [one, *[greedy(tokens)] * (requests - 1)]
            began = time.perf_counter()
            assert all(out.error is None for out in llm.generate(asked, who))
            took.append(time.perf_counter() - began)
        step_ms[name] = (took[1] - took[0]) / 128 * 1e3
    counted = {n: {place: w.count(place) for place in set(w)} for n, w in waits.items()}
    return tell(part="host", waits_in_steps=counted, step_ms=step_ms)


PARTS = {"offline": offline, "prefill": prefill, "profile": profile, "modes": modes, "host": host}
SETTINGS = {
    "load_format": "dummy",
    "backend": "cuda",
    "dtype": "bfloat16",
    "batch_invariant": True,
    "max_num_seqs": 256,
    "max_model_len": 2048,
}


def opened(model, **settings):
    return LLM(model, **settings)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="offline,prefill,profile")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, help="max_num_batched_tokens")
    parser.add_argument("--kv", help="kv_cache_memory; None: what is free")
    parser.add_argument("--json")
    args = parser.parse_args()
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "page_size": args.page_size,
        "step_tokens": args.step_tokens,
    }
    SETTINGS.update(
        page_size=args.page_size,
        max_num_batched_tokens=args.step_tokens,
        kv_cache_memory=args.kv,
    )
    if "host" in args.parts:  # dummy weights have no tokenizer that a grammar plugin could read
        assemble._grammar_backend = lambda *_: Masks(SHAPE["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE), "utf-8")
        with opened(folder, **SETTINGS) as llm:
            timed(llm, prompts(1, 64), 2)
            for part in args.parts.split(","):
                result[part] = PARTS[part](llm)
                if args.json:
                    Path(args.json).write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
