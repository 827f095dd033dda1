"""Texts to learn from: answers of the target itself to prompts, and prompts that it writes.

A draft learns what its target says, so the target writes everything, through the engine: greedy
answers, sampled ones, and conversations from the first word of the user on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from deepinfer.errors import ConfigError
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepinfer import LLM

OWN: Final = "own"
"""The set of prompts that the target wrote."""
_HELD: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How much is written.

    ``samples`` answers at temperature 1 and one greedy answer to every prompt, of at most
    ``max_tokens``; ``own`` prompts of the target's, each with one answer of both kinds.
    ``max_prompt``: longer prompts are left out. ``limit``: prompts of each file; 0 all. ``greedy``:
    False leaves the greedy answers to given prompts out.
    """

    samples: int = 3
    own: int = 0
    max_tokens: int = 384
    max_prompt: int = 384
    limit: int = 0
    greedy: bool = True
    seed: int = 0


@dataclass(slots=True)
class Texts:
    """``tokens`` int32[N]: all texts one behind the other, text i from ``start[i]`` to
    ``start[i + 1]``; ``prompt`` int32[n]: length of its prompt; ``hot`` bool[n]: sampled at
    temperature 1, else greedy; ``held`` bool[n]: not to be trained on; ``task`` [n]: an index into
    ``tasks``.
    """

    tokens: NDArray[np.int32]
    start: NDArray[np.int64]
    prompt: NDArray[np.int32]
    hot: NDArray[np.bool_]
    held: NDArray[np.bool_]
    task: NDArray[np.int32]
    tasks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompt)

    def text(self, index: int) -> NDArray[np.int32]:
        """One text."""
        return self.tokens[self.start[index] : self.start[index + 1]]

    def save(self, path: Path) -> None:
        """Whole, or not at all."""
        part = path.with_suffix(".part.npz")
        fields = {name: getattr(self, name) for name in self.__slots__}
        np.savez(part, **fields)
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Texts:
        """As saved."""
        with np.load(path) as file:
            found: dict[str, Any] = {name: file[name] for name in cls.__slots__}
        found["tasks"] = tuple(str(task) for task in found["tasks"])
        return cls(**found)


def joined(parts: Sequence[Texts]) -> Texts:
    """Several sets of texts as one."""
    tasks = tuple(sorted({task for part in parts for task in part.tasks}))
    places = [np.array([tasks.index(task) for task in part.tasks], np.int32) for part in parts]
    lengths = np.concatenate([np.diff(part.start) for part in parts])

    def of(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    return Texts(
        tokens=of("tokens"),
        start=np.concatenate([[0], np.cumsum(lengths)]),
        prompt=of("prompt"),
        hot=of("hot"),
        held=of("held"),
        task=np.concatenate([p[part.task] for p, part in zip(places, parts, strict=True)]),
        tasks=tasks,
    )


def write_waves(
    llm: LLM, prompts: Sequence[tuple[str, str]], plan: AnswerPlan, seconds: float
) -> Texts:
    """Answers by :func:`write_answers`, and as many more sampled ones as time allows."""
    began = last = time.perf_counter()
    parts = [write_answers(llm, prompts, plan)]
    while plan.samples or plan.own:
        now = time.perf_counter()
        if now - began + 1.1 * (now - last) > seconds:
            break
        last = now
        again = replace(plan, greedy=False, seed=plan.seed + len(parts))
        parts.append(write_answers(llm, prompts, again))
    return joined(parts)


def held_out(prompt: str) -> bool:
    """A tenth of all prompts, by their hash: the same ones whatever else is in a set."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD == 0


def read_prompts(folder: Path, limit: int = 0) -> Iterator[tuple[str, str]]:
    """(task, prompt) of every line of ``folder``'s ``*.jsonl``: the first of its ``turns``."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{folder} holds no *.jsonl file.", setting="prompts")
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines[: limit or None], 1):
            try:
                prompt = json.loads(line)["turns"][0]
            except (ValueError, KeyError, IndexError, TypeError) as why:
                raise ConfigError(
                    f'{file}, line {number}: expected {{"turns": ["…"]}}, found {line[:60]!r}.',
                    setting="prompts",
                ) from why
            yield file.stem, str(prompt)


def write_answers(llm: LLM, prompts: Sequence[tuple[str, str]], plan: AnswerPlan) -> Texts:
    """Let the target write. The same plan gives the same texts, as far as the engine does."""
    from deepinfer import SamplingParams

    made = _Maker()
    talks = [[{"role": "user", "content": prompt}] for _, prompt in prompts]
    ways = [0.0] * plan.greedy + [1.0] * plan.samples
    jobs = [(i, t, k) for i in range(len(talks)) for k, t in enumerate(ways)]
    rows = llm.chat(
        [talks[i] for i, _, _ in jobs],
        [
            SamplingParams(
                temperature=t,
                max_tokens=plan.max_tokens,
                seed=_seed(plan.seed, prompts[i][1], k),
                detokenize=False,
            )
            for i, t, k in jobs
        ],
    )
    for (i, t, _), out in zip(jobs, rows, strict=True):
        task, prompt = prompts[i]
        made.add(out, task, t > 0, held_out(prompt), plan.max_prompt)
    if plan.own:
        _own_talks(llm, plan, made)
    return made.texts()


def _own_talks(llm: LLM, plan: AnswerPlan, made: _Maker) -> None:
    """The target goes on where a user would begin to write, and answers what came."""
    from deepinfer import SamplingParams

    one = SamplingParams(temperature=0, max_tokens=1)
    a, b = llm.chat([[{"role": "user", "content": text}] for text in ("a", "7")], one)
    ids = [list(out.prompt_token_ids) for out in (a, b)]
    head = _common(*ids)
    tail = _common(*(row[::-1] for row in ids))[::-1]
    written = llm.generate(
        [head] * plan.own,
        [
            SamplingParams(
                temperature=1.0, top_p=0.95, max_tokens=96, detokenize=False,
                seed=_seed(plan.seed, OWN, k), stop_token_ids=(tail[0],),
            )
            for k in range(plan.own)
        ],
    )  # fmt: skip
    asked = []
    for out in written:
        found = list(out.outputs[0].token_ids)
        if out.outputs[0].finish_reason != "stop":
            continue
        found = found[:-1] if found and found[-1] == tail[0] else found
        if len(found) > 2:
            asked.append([*head, *found, *tail])
    ways = [(talk, t) for talk in asked for t in (0.0, 1.0)]
    rows = llm.generate(
        [talk for talk, _ in ways],
        [
            SamplingParams(
                temperature=t, max_tokens=plan.max_tokens, detokenize=False,
                seed=_seed(plan.seed, str(talk), 0),
            )
            for talk, t in ways
        ],
    )  # fmt: skip
    for (talk, t), out in zip(ways, rows, strict=True):
        made.add(out, OWN, t > 0, held_out(str(talk)), plan.max_prompt)


class _Maker:
    """Collects answers."""

    def __init__(self) -> None:
        self._rows: list[tuple[list[int], int, bool, bool, str]] = []

    def add(self, out: Any, task: str, hot: bool, held: bool, most: int) -> None:
        """An answer; one that failed, is empty or follows too long a prompt is left out."""
        prompt = list(out.prompt_token_ids or ())
        answer = list(out.outputs[0].token_ids) if out.error is None else []
        if answer and len(prompt) <= most:
            self._rows.append(([*prompt, *answer], len(prompt), hot, held, task))

    def texts(self) -> Texts:
        """All of them."""
        if not self._rows:
            raise ConfigError("The target wrote no answer.", setting="prompts")
        ids, prompt, hot, held, task = zip(*self._rows, strict=True)
        tasks = tuple(sorted(set(task)))
        return Texts(
            tokens=np.concatenate([np.array(row, np.int32) for row in ids]),
            start=np.cumsum([0, *map(len, ids)], dtype=np.int64),
            prompt=np.array(prompt, np.int32),
            hot=np.array(hot),
            held=np.array(held),
            task=np.array([tasks.index(name) for name in task], np.int32),
            tasks=tasks,
        )


def _common(a: list[int], b: list[int]) -> list[int]:
    """The beginning that both have."""
    return [x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]


def _seed(seed: int, text: str, k: int) -> int:
    digest = hashlib.sha256(f"{seed} {k} {text}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
