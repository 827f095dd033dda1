"""Seconds of a step, measured on the device in use: :func:`measure_steps`.

Where you are: beside ``host``, before the first request. A planner asks for steps of certain
shapes; they run through the ordinary runner, on texts of nobody: slots and pages are given out anew
when requests come, and pages are written before they are read.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepinfer.api.plan import DECODE, Admit, BatchPlan, RowBlock, RowParams

if TYPE_CHECKING:
    from deepinfer.api.executor import ModelFacts
    from deepinfer.api.speculative import StepShape
    from deepinfer.worker.runner import ModelRunner

CONTEXT = 256
"""Tokens of a text in a measured step, where the model and the pool have room for them."""
ROUNDS, STEPS = 3, 2


def measure_steps(
    runner: ModelRunner, facts: ModelFacts, shapes: Sequence[StepShape]
) -> list[float]:
    """Seconds of a step of each shape; a step's first runs, which may compile, are left out.

    The least of a few rounds: whatever else the machine does only adds. The shapes take turns, so
    that a machine that is slow for a second is slow for all.

    A shape with more requests than slots or pages, or more drafts than they may run, is cut.
    """
    with runner.measuring():
        every = [_Steps(runner, facts, shape) for shape in shapes]
        for steps in every:
            steps.warm()
        rounds = [[steps.seconds() for steps in every] for _ in range(ROUNDS)]
        return [min(times) for times in zip(*rounds, strict=True)]


def device_name(device: torch.device) -> str:
    """What seconds depend on beside the model: the processor, and how much of it is used."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} {platform.machine()} {os.cpu_count()} {torch.get_num_threads()}"


class _Steps:
    """Steps of one shape, on the slots that all share, numbered below zero so that no engine's step
    is meant.
    """

    def __init__(self, runner: ModelRunner, facts: ModelFacts, shape: StepShape) -> None:
        self._runner = runner
        self._size = facts.page_size
        self._gamma = facts.draft_len
        self._warm = runner.warm_steps
        grown = (1 + facts.draft_len) * (max(self._warm, 1 + STEPS) + 1)
        self._context = max(1, min(CONTEXT, facts.max_model_len - 1 - grown))
        self._length = min(self._context + grown, facts.max_model_len)
        self._each = -(-self._length // self._size)
        self._pages = facts.num_pages
        self._n = max(1, min(shape.requests, runner.slots.shape.slots))
        self._k = min(shape.drafts, self._n * self._gamma)
        self._propose = shape.propose
        self._step = 0

    def warm(self) -> None:
        """Steps that may compile."""
        self._run(self._warm, self._admits())

    def seconds(self) -> float:
        """Of one of a few steps that follow each other at once, behind one that takes the slots."""
        self._run(1, self._admits())
        began = time.perf_counter()
        self._run(STEPS)
        return (time.perf_counter() - began) / STEPS

    def _run(self, steps: int, admits: tuple[Admit, ...] = ()) -> None:
        for _ in range(steps):
            self._step -= 1
            if self._k:
                self._runner.slots.drafted[: self._n] = self._gamma
            self._runner.forward(self._plan(admits))
            answer = self._runner.sample(self._step, None)
            admits = ()
        answer.result()

    def _admits(self) -> tuple[Admit, ...]:
        params = RowParams(prompt_len=self._context, temperature=0.0)
        tokens = np.arange(self._context, dtype=np.int32) % 97 + 3
        tokens %= self._runner.slots.shape.vocab_size
        return tuple(Admit(slot, tokens, self._length, slot, params) for slot in range(self._n))

    def _plan(self, admits: tuple[Admit, ...]) -> BatchPlan:
        rows = np.zeros((self._n, 5), np.int32)
        rows[:, 0], rows[:, 1] = np.arange(self._n), DECODE
        rows[:, 2], rows[:, 3] = (1 + self._gamma if self._k else 1), 1
        pages = np.zeros((0, 3), np.int32)
        if admits:
            place = np.stack(np.divmod(np.arange(self._n * self._each), self._each), 1)
            page = np.arange(self._n * self._each) % self._pages
            pages = np.concatenate((place, page[:, None]), 1).astype(np.int32)
        return BatchPlan(
            step=self._step,
            admits=admits,
            rows=RowBlock(rows),
            pages=pages,
            draft_rows=self._k,
            shape=self._n + self._k,
            propose=self._propose,
        )
