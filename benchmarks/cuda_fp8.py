"""What FP8 weights give an engine of 8B shapes: milliseconds a token at several batch sizes.

    python benchmarks/cuda_fp8.py [--json FILE] [--batches 1,16,64]

Dummy weights; the time between a short and a longer text of the same prompts, so that prefill and
start are in neither. ``weights``: bytes that they take.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from pathlib import Path

from cuda_startup import MODEL

PROMPT, SHORT, LONG = 64, 8, 72


def took(llm, batch, tokens):
    """Seconds of one call."""
    from deepinfer import SamplingParams

    params = SamplingParams(temperature=0.7, seq_seed=1, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(i + 1, i + 1 + PROMPT))} for i in range(batch)]
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def measured(folder, quantization, batches):
    from deepinfer import LLM

    options = {"load_format": "dummy", "max_model_len": 1024, "enable_prefix_caching": False}
    with LLM(folder, backend="cuda", quantization=quantization, **options) as llm:
        found = {"weights": llm.assembly.facts.weight_bytes}
        for batch in batches:
            took(llm, batch, LONG)
            pairs = [(took(llm, batch, LONG), took(llm, batch, SHORT)) for _ in range(3)]
            best = min(long - short for long, short in pairs) / (LONG - SHORT)
            found[f"ms a token, batch {batch}"] = round(1e3 * best, 3)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--batches", default="1,16,64")
    args = parser.parse_args()
    import torch
    import triton

    found = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    found |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), "utf-8")
        for quantization in (None, "fp8"):
            name = quantization or "bfloat16"
            found[name] = measured(folder, quantization, map(int, args.batches.split(",")))
            print(name, json.dumps(found[name]), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
