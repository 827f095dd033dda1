"""Offline inference: a batch of prompts through one engine.

    python examples/offline_inference.py
    python examples/offline_inference.py --model path/to/model --max-num-seqs 64
    python examples/offline_inference.py --prompt "The three primary colours are"
    python examples/offline_inference.py --device cuda

Without ``--model`` it runs the demo model, SmolLM2-135M-Instruct, fetched once (93 MB).
"""

from __future__ import annotations

import argparse

from deepinfer.entrypoints.llm import LLM
from deepinfer.errors import DeepInferError
from deepinfer.sampling_params import SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Once upon a time, in a small village by the sea,",
]


def parse_args() -> argparse.Namespace:
    """The published options, and what a first look needs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="directory, GGUF file, hub id or demo")
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], help="default: the best here")
    parser.add_argument("--ep", type=int, default=1, help="accelerators for the experts")
    parser.add_argument("--dp", type=int, default=1, help="data parallelism")
    parser.add_argument("--cp", type=int, default=1, help="context parallelism")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="requests that run at once")
    parser.add_argument("--batch-invariant", action="store_true", default=None)
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=1, help="same seed, same texts")
    return parser.parse_args()


def main() -> None:
    """Generate, then show each prompt with its text and why it ended."""
    args = parse_args()
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        seq_seed=args.seed,
    )
    with LLM(
        model=args.model,
        device=args.device,
        expert_parallel_size=args.ep,
        data_parallel_size=args.dp,
        context_parallel_size=args.cp,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        batch_invariant=args.batch_invariant,
        trust_remote_code=True,
    ) as llm:
        outputs = llm.generate(prompts=args.prompt or PROMPTS, sampling_params=params)
        tokenizer = llm.get_tokenizer()
        for output in outputs:
            text = tokenizer.decode([token.token_id for token in output])
            print(f"{output.prompt!r} -> {text!r}  [{output.outputs[0].finish_reason}]")


if __name__ == "__main__":
    try:
        main()
    except DeepInferError as error:
        raise SystemExit(f"error: {error}") from None
