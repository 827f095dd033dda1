"""From a process that does not exist to the first token: an 8B decoder with dummy weights.

    python benchmarks/cuda_startup.py [--json FILE] [--cache FOLDER] [--warm 2] [--layers 32]

One start with an empty kernel cache, then ``--warm`` starts that find it filled; each is a new
process, timed from outside. Stages are ``Assembly.timings``; ``FOLDER`` is left behind filled, so
that it can be shipped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "hidden_act": "silu", "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPT = 512


def child(model, began, backend):
    """One start; prints its times as JSON. ``began``: wall clock of whoever started the process."""
    times = {"interpreter": time.time() - began}
    before = time.perf_counter()
    from deepinfer import LLM, SamplingParams

    times["import deepinfer"] = time.perf_counter() - before
    llm = LLM(model, backend=backend, load_format="dummy", max_model_len=4096)
    times |= llm.assembly.timings
    params = SamplingParams(temperature=0.7, max_tokens=1, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(1, PROMPT + 1))}

    def answer(tokens):
        before = time.perf_counter()
        llm.generate(prompt, params.model_copy(update={"max_tokens": tokens}))
        return time.perf_counter() - before

    times["first token"] = answer(1)
    times["until first token"] = time.time() - began
    profile = llm.assembly.executor.call("profile")[0]
    times |= {k: v for k, v in profile.items() if k.startswith("kernels")}
    times["17 tokens, first time"] = answer(17)
    times["17 tokens, again"] = answer(17)
    profile = llm.assembly.executor.call("profile")[0]
    times |= {f"{k}, in all": v for k, v in profile.items() if k.startswith("kernels")}
    print(json.dumps(times), flush=True)
    llm.close()


def start(model, cache, backend):
    """Times of a new process that keeps kernels below ``cache``."""
    began = time.time()
    command = [sys.executable, __file__, "--child", model, str(began), backend]
    done = subprocess.run(
        command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def shown(title, times):
    print(title)
    for name, seconds in times.items():
        outer, _, part = name.rpartition(" / ")
        print(f"  {'  ' + part if outer else name:<32} {seconds:8.3f} s")
    sys.stdout.flush()


def main():
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], float(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--cache", help="where compiled kernels lie; a new folder if not given")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    parser.add_argument("--backend", default="cuda")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(args.cache or folder) / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**MODEL, "num_hidden_layers": args.layers})
        Path(folder, "config.json").write_text(text, "utf-8")
        found = {"date": datetime.date.today().isoformat(), "prompt": PROMPT, "starts": []}
        for index in range(1 + args.warm):
            times = start(folder, cache, args.backend)
            shown("empty kernel cache" if index == 0 else "kernel cache filled", times)
            found["starts"].append({k: round(v, 3) for k, v in times.items()})
            files = [f for f in cache.rglob("*") if f.is_file()]
            found["cache_files"] = len(files)
            found["cache_bytes"] = sum(f.stat().st_size for f in files)
            if args.json:
                Path(args.json).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
