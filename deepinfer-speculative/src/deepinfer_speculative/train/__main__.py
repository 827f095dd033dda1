"""``python -m deepinfer_speculative.train``: a draft for a dense target, from prompts alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from deepinfer.errors import ConfigError, DeepInferError
from deepinfer.models.checkpoint import Checkpoint, open_checkpoint
from deepinfer.models.source import resolve

from deepinfer_speculative.dspark.config import check_target, read_config
from deepinfer_speculative.dspark.save import draft_config, save_draft
from deepinfer_speculative.train.answers import AnswerPlan, Texts, read_prompts, write_waves
from deepinfer_speculative.train.data import Pool
from deepinfer_speculative.train.evaluate import fit, summary, walk
from deepinfer_speculative.train.loop import TrainPlan, planned_steps, timed_steps, train
from deepinfer_speculative.train.network import Network
from deepinfer_speculative.train.target import Target, dense_config

Tell = Callable[[str], None]
LONGEST: Final = 1024
"""Tokens of a prompt and its answer."""
_NONE, _ONE = click.IntRange(0), click.IntRange(1)


@click.command(context_settings={"show_default": True})
@click.option("--target", required=True, help="The model to draft for: demo, a path or a hub id.")
@click.option(
    "--prompts",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help='A folder of *.jsonl files with lines {"turns": ["…"]}.',
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Where all goes.")
@click.option("--steps", default=2000, type=_ONE, help="Optimiser steps.")
@click.option("--batch", default=64, type=_ONE, help="Texts a step.")
@click.option("--anchors", default=64, type=_ONE, help="Blocks of each text a step.")
@click.option("--lr", default=1e-3, help="Highest learning rate.")
@click.option(
    "--warm", default=0.5, help="Share of the steps over which KL gives way to the L1 distance."
)
@click.option(
    "--start",
    default="random",
    type=click.Choice(["random", "target"]),
    help="First weights: random, or those of the target's last layers.",
)
@click.option("--layers", default=2, help="Decoder layers of the draft.")
@click.option("--block", default=5, help="Tokens of a block.")
@click.option("--rank", default=64, help="Of the Markov head.")
@click.option("--taps", default="", help="Target layers to read; none: spread evenly.")
@click.option("--mask-token", required=True, type=int, help="An id that texts never have.")
@click.option("--samples", default=3, type=_NONE, help="Answers at temperature 1 to each prompt.")
@click.option("--own", default=0, type=_NONE, help="Prompts that the target writes itself.")
@click.option("--max-tokens", default=384, type=_ONE, help="Of an answer.")
@click.option("--limit", default=0, type=_NONE, help="Prompts of each file; 0 is all.")
@click.option(
    "--answer-seconds", default=0.0, help="Go on with more sampled answers for so long; 0: no."
)
@click.option(
    "--train-seconds", default=0.0, help="Choose the steps by time in place of --steps; 0: no."
)
@click.option("--seed", default=0, help="Of everything.")
@click.option("--device", default="cpu", help="cpu or cuda, of training and of the engine.")
@click.option(
    "--dtype",
    default="float32",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the target and of activations.",
)
@click.option(
    "--keep-states/--no-keep-states",
    default=False,
    help="Compute the target's states once and keep them in device memory.",
)
@click.option(
    "--evaluate", default=200, type=_NONE, help="Held-out texts of each kind to judge by."
)
@click.option("--shard-mb", default=12, type=_ONE, help="Largest file of weights.")
def main(**options: Any) -> None:
    """Let the target answer, train a draft on the answers, judge it, write a checkpoint."""
    try:
        run(options, click.echo)
    except DeepInferError as why:
        raise click.ClickException(str(why)) from why


def run(options: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """All stages; returns the training record, which lies beside the weights too."""
    out: Path = options["out"]
    out.mkdir(parents=True, exist_ok=True)
    clock = _Clock()
    checkpoint = open_checkpoint(resolve(options["target"]))
    device = _device(options["device"])
    raw = _draft(options, checkpoint)  # what cannot be is refused before anything is answered
    texts = _texts(options, checkpoint, out, tell)
    clock.stamp("answers")
    dtype = getattr(torch, options["dtype"])
    target = Target(checkpoint, device, dtype)
    network = Network(raw, target.embed, target.norm, options["seed"])
    if options["start"] == "target":
        network.start_from(checkpoint)
    learn = np.flatnonzero(~texts.held)
    names = ("steps", "batch", "anchors", "lr", "seed", "warm")
    plan = TrainPlan(**{name: options[name] for name in names})
    state = out / "state.pt"
    pool = Pool(texts, learn, target, network.config.taps, options["keep_states"])
    clock.stamp("states")
    if options["train_seconds"]:
        other = Network(raw, target.embed, target.norm, options["seed"])
        steps = planned_steps(state) or timed_steps(
            other, pool, target.head, plan, options["train_seconds"]
        )
        plan = replace(plan, steps=steps)
    history = train(network, pool, target.head, plan, state, tell)
    del pool
    clock.stamp("training")
    judged, temperatures = judge(network, texts, target, options["evaluate"])
    clock.stamp("evaluation")
    record = {
        "target": options["target"],
        "target_fingerprint": checkpoint.fingerprint(),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in options.items()
                    if k not in ("prompts", "out")},
        "steps": plan.steps,
        "texts": _counts(texts),
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds": clock.seconds,
        "torch": torch.__version__.split("+")[0],
        "held_out": judged,
        "history": history,
    }  # fmt: skip
    weights = {name: t.to(torch.bfloat16).cpu() for name, t in network.tensors().items()}
    draft = out / "draft"
    save_draft(draft, raw, weights, options["shard_mb"] << 20)
    (draft / "calibration.json").write_text(json.dumps({"exact": temperatures}, indent=1) + "\n")
    (draft / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    tell(json.dumps(judged, indent=1))
    return record


def _device(given: str) -> torch.device:
    try:
        device = torch.device(given)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device={given!r}: expected cpu or cuda.", setting="device")
    return device


def _draft(options: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The draft's config.json.

    Raises:
        DeepInferError: there can be no such draft for this target.
    """
    shape = dense_config(checkpoint)
    raw = draft_config(
        {**checkpoint.config, "num_hidden_layers": shape.layers},
        layers=options["layers"],
        block=options["block"],
        taps=_taps(options["taps"], shape.layers),
        mask_token=options["mask_token"],
        rank=options["rank"],
        norms=shape.qk_norm,
    )
    check_target(read_config(raw), raw, shape)
    return raw


def judge(
    network: Network, texts: Texts, target: Target, most: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Held-out texts, greedy and sampled: what stood, and temperatures for the confidences."""
    judged: dict[str, Any] = {}
    temperatures: dict[str, list[float]] = {}
    for way, hot in (("greedy", False), ("sampled", True)):
        which = _spread(texts, np.flatnonzero(texts.held & (texts.hot == hot)), most)
        if not len(which):
            continue
        pool = Pool(texts, which, target, network.config.taps)
        rounds = walk(network, pool, target.head, which, hot)
        judged[way] = summary(rounds, texts.tasks)
        if (rounds.possible == rounds.logits.shape[1]).sum() >= 2:
            temperatures[way], judged[way]["calibration_error"] = fit(rounds)
            judged[way]["temperatures"] = temperatures[way]
    return judged, temperatures


def _spread(texts: Texts, which: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """At most so many, evenly from what there is, which stands task by task."""
    if len(which) <= most:
        return which
    chosen = np.linspace(0, len(which) - 1, most).astype(np.int64)
    return np.asarray(which[chosen])


def _texts(options: dict[str, Any], checkpoint: Checkpoint, out: Path, tell: Tell) -> Texts:
    """Those that ``out`` holds, or new ones, with the settings that they were written with beside
    them.
    """
    path, settings = out / "answers.npz", out / "answers.json"
    names = ("samples", "own", "max_tokens", "limit", "seed")
    mine = {name: options[name] for name in (*names, "answer_seconds", "dtype")}
    mine["target_fingerprint"] = checkpoint.fingerprint()
    if path.is_file():
        said = json.loads(settings.read_text("utf-8")) if settings.is_file() else mine
        other = [f"{k} {said.get(k)}, not {v}" for k, v in mine.items() if said.get(k) != v]
        if other:
            raise ConfigError(
                f"{path} was written with other settings: {'; '.join(other)}.",
                setting="out",
                next_step="Give the same settings, or another folder.",
            )
        return Texts.read(path)
    from deepinfer import LLM

    plan = AnswerPlan(**{name: options[name] for name in names})
    prompts = list(read_prompts(options["prompts"], plan.limit))
    tell(f"{len(prompts)} prompts")
    cuda = options["device"].startswith("cuda")
    more = {"device": "cuda", "dtype": options["dtype"], "max_num_seqs": 512} if cuda else {}
    length = min(LONGEST, dense_config(checkpoint).max_model_len)
    with LLM(options["target"], max_model_len=length, **more) as llm:
        texts = write_waves(llm, prompts, plan, options["answer_seconds"])
    settings.write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")
    texts.save(path)
    tell(f"{len(texts)} texts, {len(texts.tokens)} tokens")
    return texts


def _taps(given: str, layers: int) -> tuple[int, ...]:
    """As given, or five from the second layer to the third last, evenly."""
    if given:
        try:
            return tuple(int(part) for part in given.split(","))
        except ValueError as why:
            raise ConfigError(
                f"--taps={given!r}: expected layers, as 1,14,27.", setting="taps"
            ) from why
    low, high = min(1, layers - 2), max(layers - 3, 0)
    spread = np.linspace(low, high, 5).round().astype(int)
    return tuple(dict.fromkeys(spread.tolist()))


def _counts(texts: Texts) -> dict[str, Any]:
    return {
        "texts": len(texts),
        "tokens": len(texts.tokens),
        "held_out": int(texts.held.sum()),
        "by_task": {name: int((texts.task == i).sum()) for i, name in enumerate(texts.tasks)},
    }


class _Clock:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stamp(self, name: str) -> None:
        """A stage has ended."""
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 1)
        self._last = now


if __name__ == "__main__":
    main()
