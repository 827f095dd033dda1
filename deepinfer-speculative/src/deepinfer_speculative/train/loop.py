"""The steps: AdamW, warm-up and cosine, and a state from which a run goes on bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from deepinfer.errors import ConfigError
from torch import Tensor

from deepinfer_speculative.train.data import Batch, Pool
from deepinfer_speculative.train.losses import Losses, losses
from deepinfer_speculative.train.network import Network

WARM: Final = 0.04
CLIP: Final = 1.0
KEPT: Final = 300.0
"""Seconds after which a state is written anyway: steps may be slow."""
_TIMED: Final = 40  # steps from which the time of one is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """``batch`` texts with ``anchors`` blocks each a step; ``lr``: the highest; ``save``: steps
    between states, which slow steps have more often; ``seed``: of the initial weights and of every
    choice; ``warm``: the share of the steps over which the divergence gives way to the distance
    (:mod:`.losses`).
    """

    steps: int
    batch: int = 64
    anchors: int = 64
    lr: float = 1e-3
    save: int = 500
    seed: int = 0
    warm: float = 0.0


def timed_steps(network: Network, pool: Pool, head: Tensor, plan: TrainPlan, seconds: float) -> int:
    """How many steps of this plan take so long; trains ``network``, which is thrown away then.

    At most a tenth of the time goes into finding out: half of it in steps that are not counted,
    since the first ones of each shape are slow.
    """
    optimizer = _optimizer(network, plan)
    began = last = time.perf_counter()
    warm, step = 0, 0
    while step < warm + _TIMED or not warm:
        batch = pool.batch(step, plan.batch, plan.anchors, plan.seed)
        _step(network, optimizer, batch, head, min(plan.warm, 1.0))
        _wait(head)
        step += 1
        now = time.perf_counter()
        if not warm and (step == _TIMED or now - began > seconds / 20):
            warm, last = step, now
        elif warm and now - last > seconds / 20:
            break
    each = (now - last) / (step - warm)
    return max(1, int((seconds - (now - began)) / each))


def _optimizer(network: Network, plan: TrainPlan) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        network.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0,
        fused=network.embed.device.type == "cuda",
    )  # fmt: skip


def _step(
    network: Network, optimizer: torch.optim.Optimizer, batch: Batch, head: Tensor, share: float
) -> Losses:
    found = losses(network, batch, head, share)
    optimizer.zero_grad(set_to_none=True)
    found.total.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
    optimizer.step()
    return found


def _wait(on: Tensor) -> None:
    if on.device.type == "cuda":
        torch.cuda.synchronize(on.device)


def planned_steps(state: Path) -> int | None:
    """The steps of the run that left this state; None without one."""
    if not state.is_file():
        return None
    return int(torch.load(state, map_location="cpu", weights_only=True)["plan"]["steps"])


def rate(step: int, plan: TrainPlan) -> float:
    """The learning rate of a step: up over 4 %, then down along a cosine to 0."""
    warm = max(1, round(WARM * plan.steps))
    if step < warm:
        return plan.lr * (step + 1) / warm
    done = (step - warm) / max(1, plan.steps - warm)
    return plan.lr * 0.5 * (1 + math.cos(math.pi * done))


def divergence(step: int, plan: TrainPlan) -> float:
    """The divergence's share at a step: 1 at first, down evenly to 0."""
    return max(0.0, 1.0 - step / (plan.warm * plan.steps)) if plan.warm else 0.0


def train(
    network: Network,
    pool: Pool,
    head: Tensor,
    plan: TrainPlan,
    state: Path,
    tell: Callable[[str], None],
) -> list[dict[str, float]]:
    """All steps that ``state`` does not hold yet; returns what was measured along the way.

    Raises:
        ConfigError: the state belongs to another plan.
    """
    optimizer = _optimizer(network, plan)
    begin, history = _resume(network, optimizer, plan, state)
    clock = kept = time.perf_counter()
    for step in range(begin, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, plan)
        batch = pool.batch(step, plan.batch, plan.anchors, plan.seed)
        found = _step(network, optimizer, batch, head, divergence(step, plan))
        if (step + 1) % max(1, plan.steps // 40) == 0 or step + 1 == plan.steps:
            history.append(_line(step + 1, found, time.perf_counter() - clock))
            tell(" ".join(f"{k}={v:.4g}" for k, v in history[-1].items()))
        due = (step + 1) % plan.save == 0 or time.perf_counter() - kept > KEPT
        if due or step + 1 == plan.steps:
            _save(network, optimizer, plan, state, (step + 1, history))
            kept = time.perf_counter()
    return history


def _line(step: int, found: Any, seconds: float) -> dict[str, float]:
    """``length``: expected accepted length, from the overlap of each slot: 1 + Σ Π c*."""
    size = int(found.place.max()) + 1
    by_place = [found.overlap[found.place == k].mean().item() for k in range(size)]
    length = 1.0 + sum(math.prod(by_place[: k + 1]) for k in range(size))
    values = {"ce": found.ce, "l1": found.l1, "sure": found.sure}
    return {"step": step, "length": length, "seconds": seconds} | {
        name: value.item() for name, value in values.items()
    }


def _save(
    network: Network, optimizer: Any, plan: TrainPlan, path: Path, at: tuple[int, Any]
) -> None:
    part = path.with_suffix(".part")
    torch.save(
        {
            "plan": asdict(plan),
            "draft": repr(network.config),
            "step": at[0],
            "history": at[1],
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        part,
    )
    part.replace(path)


def _resume(
    network: Network, optimizer: Any, plan: TrainPlan, path: Path
) -> tuple[int, list[dict[str, float]]]:
    if not path.is_file():
        return 0, []
    saved = torch.load(path, map_location=network.embed.device, weights_only=True)
    if saved["plan"] != asdict(plan):
        raise ConfigError(
            f"{path} was left by a run with other settings: {saved['plan']}.",
            setting="out",
            next_step="Give the same settings, or another folder.",
        )
    if saved.get("draft", repr(network.config)) != repr(network.config):
        raise ConfigError(
            f"{path} was left by a run for another draft: {saved['draft']}.",
            setting="out",
            next_step="Give the same settings, or another folder.",
        )
    network.load_state_dict(saved["network"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"]), list(saved["history"])
