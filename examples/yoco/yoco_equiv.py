"""Prefill truncation (YOCO): what each mode computes, beside running every row.

    python examples/yoco/yoco_equiv.py
    python examples/yoco/yoco_equiv.py --model path/to/model --lengths 500 5000 --keep 140 1024

Layers behind the last one that keeps KV of all tokens need not run on a prompt's beginning. The
same prompts run with every ``yoco_prefill_truncation_mode`` and every number of kept rows; the
table shows how far the logprobs of the prompt's last row lie from those of ``off``, whether the
greedy tokens are the same, and the time to the first token. Exit status 1: ``mask`` and ``compact``
differ in a bit, or ``exact`` and ``off`` do where results may not depend on the batch.

Without ``--model`` it writes a tiny random DeepSeek-V4.1 into a temporary folder.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from deepinfer import LLM, SamplingParams
from deepinfer.errors import DeepInferError

TINY_LENGTHS, TINY_KEEP = (24, 100, 400), (16, 32, 140)
LENGTHS, KEEP = (500, 2000), (140, 512)
Mode = Literal["compact", "mask", "off", "exact"]


class Setting(NamedTuple):
    """How one engine truncates. ``keep``: rows that compact and mask keep."""

    mode: Mode
    keep: int | None = None
    invariant: bool = False

    def __str__(self) -> str:
        return f"{self.mode}{' (invariant)' if self.invariant else ''}"


class Answer(NamedTuple):
    """To one prompt: rows that late layers ran, greedy tokens, float32[tokens, V] logprobs of
    everything that could have been in their place, and seconds to the first of them.
    """

    kept: int
    tokens: tuple[int, ...]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    seconds: float


Answers = Mapping[Setting, Sequence[Answer]]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory or hub id; default: a tiny random one")
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths")
    parser.add_argument("--keep", type=int, nargs="+", help="rows that compact and mask keep")
    parser.add_argument("--tokens", type=int, default=8, help="greedy tokens of each answer")
    parser.add_argument("--seed", type=int, default=0, help="of the random prompts")
    parser.add_argument("--backend", help="default: the best one found")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args(argv)
    tiny = args.model is None
    args.lengths = args.lengths or list(TINY_LENGTHS if tiny else LENGTHS)
    args.keep = args.keep or list(TINY_KEEP if tiny else KEEP)
    return args


def write_tiny(folder: Path) -> str:
    """Ten layers, four behind the last KV source; a window of 16: exact from 61 kept rows on."""
    from deepinfer.testing.tiny_v41 import write_tiny_v41
    from deepinfer.testing.v41_config import schedule

    text = {**schedule(10, drafts=0), "index_topk": 12, "candidate_topk_blocks": 8}
    return str(write_tiny_v41(folder, overrides={"text_config": text}))


def settings(keep: Sequence[int]) -> list[Setting]:
    """All that are compared, ``off`` first."""
    plain = [Setting("off"), Setting("exact")]
    pairs: list[Setting] = [Setting(mode, k) for k in keep for mode in ("compact", "mask")]
    return [*plain, *pairs, Setting("off", invariant=True), Setting("exact", invariant=True)]


def answers(model: str, how: Setting, args: argparse.Namespace) -> list[Answer]:
    """One engine, one prompt after the other. Prompts depend on the seed and vocabulary alone."""
    wish = SamplingParams(
        temperature=0, max_tokens=args.tokens, logprobs=-1, ignore_eos=True, detokenize=False
    )
    with LLM(
        model,
        backend=args.backend,
        max_num_seqs=1,
        max_model_len=max(args.lengths) + args.tokens,
        yoco_prefill_truncation_mode=how.mode,
        yoco_prefill_keep_tokens=how.keep,
        batch_invariant=how.invariant,
        enable_prefix_caching=False,
        num_threads=args.threads,
    ) as llm:
        facts = llm.assembly.facts
        draw, vocab = random.Random(args.seed), facts.vocab_size
        cut = facts.kv.truncation
        found = []
        for length in (min(args.lengths), *args.lengths):  # the first one warms up
            ids = [draw.randrange(vocab // 8, vocab * 7 // 8) for _ in range(length)]
            (output,) = llm.generate({"prompt_token_ids": ids}, wish)
            assert output.metrics is not None and output.outputs[0].logprobs is not None
            rows = [[row[i].logprob for i in range(vocab)] for row in output.outputs[0].logprobs]
            kept = length - (0 if cut is None else cut.floor(length))
            tokens = tuple(output.outputs[0].token_ids)
            seconds = output.metrics.prefill_seconds or 0.0
            found.append(Answer(kept, tokens, np.array(rows, np.float32), seconds))
    return found[1:]


def equal(one: Answer, two: Answer) -> bool:
    """Tokens and every bit of every logprob."""
    a, b = one.logprobs.view(np.int32), two.logprobs.view(np.int32)
    return one.tokens == two.tokens and np.array_equal(a, b)


def difference(one: Answer, two: Answer) -> float:
    """Largest, of the prompt's last row."""
    a, b = one.logprobs[0], two.logprobs[0]
    return float(np.abs(np.where(a == b, 0.0, a - b)).max())


def table(found: Answers, lengths: Sequence[int]) -> Iterator[str]:
    """A line for each prompt and setting, beside ``off``."""
    columns = ("mode", "keep", "rows kept", "max difference", "tokens", "prefill ms")
    for i, length in enumerate(lengths):
        yield f"\nprompt of {length} tokens"
        yield "{:<18}{:>6}{:>11}{:>16}{:>10}{:>12}".format(*columns)
        for how, each in found.items():
            base, answer = found[Setting("off")][i], each[i]
            same = "equal" if answer.tokens == base.tokens else "DIFFER"
            yield (
                f"{how!s:<18}{how.keep or '':>6}{answer.kept:>11}{difference(answer, base):>16.2e}"
                f"{same:>10}{1000 * answer.seconds:>12.1f}"
            )


def faults(found: Answers, lengths: Sequence[int]) -> list[str]:
    """What must be equal bit for bit, and is not."""
    pairs = [(how, how._replace(mode="mask")) for how in found if how.mode == "compact"]
    pairs.append((Setting("off", invariant=True), Setting("exact", invariant=True)))
    return [
        f"{one} and {two} differ at {length} tokens" + (f", keep {one.keep}" if one.keep else "")
        for one, two in pairs
        for i, length in enumerate(lengths)
        if not equal(found[one][i], found[two][i])
    ]


def compare(model: str, args: argparse.Namespace) -> int:
    """Run, print, judge; returns the exit status."""
    found = {how: answers(model, how, args) for how in settings(args.keep)}
    name = args.model or "a tiny random DeepSeek-V4.1"
    print(f"{name}; differences of the last row's logprobs, and greedy tokens, beside off")
    print("\n".join(table(found, args.lengths)))
    wrong = faults(found, args.lengths)
    for sentence in wrong:
        print(f"FAIL: {sentence}")
    if not wrong:
        print("\nmask = compact, and in invariant mode exact = off: bit for bit")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.model is not None:
            return compare(args.model, args)
        with tempfile.TemporaryDirectory(prefix="yoco-") as folder:
            return compare(write_tiny(Path(folder)), args)
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
