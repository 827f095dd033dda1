"""Is the text with speculation the text without, and what does it bring? One workload, every mode.

Where you are: behind ``deepinfer verify speculation``, usable by authors of drafters. Ids are
compared one by one; the rest is counted by a planner of ours that asks the engine's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deepinfer.entrypoints.llm import LLM
from deepinfer.errors import ConfigError
from deepinfer.sampling_params import SamplingParams
from deepinfer.testing.lab import workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deepinfer.api.speculative import DraftChoice, DraftFacts, DraftPlanner, DraftsLanded
    from deepinfer.config import EngineConfig

MODES: Final = ("static", "cap", "adaptive")
_BINS: Final = 15
_TEXTS: Final = (
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "Write the numbers from one to twenty, one on each line.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "What is the capital of France? What is the capital of Italy?",
    "A farmer has 12 sheep and buys 5 more. How many sheep does he have? Explain each step.",
    "Write a short poem about the sea.",
)


@dataclass(slots=True)
class Watched:
    """What the answers of an engine's steps say of drafts.

    ``ran`` and ``stood`` int64[γ]: drafts at each place in a block that were verified, and that
    stood. ``rounds``: rows that verified some. ``said``: (probability that all up to this draft
    stand, whether they did) of verified drafts, where a drafter is confident. ``blocks``:
    (confidences float64[γ], drafts that ran, drafts that stood) of each such round.
    """

    ran: NDArray[np.int64]
    stood: NDArray[np.int64]
    rounds: int = 0
    said: list[tuple[float, bool]] = field(default_factory=list)
    blocks: list[tuple[NDArray[np.float64], int, int]] = field(default_factory=list)

    def calibration(self) -> float | None:
        """Expected calibration error of the survivals over 15 bins; None without confidences."""
        if not self.said:
            return None
        p = np.array([probability for probability, _ in self.said])
        gap = p - np.array([stood for _, stood in self.said])
        bins = np.minimum((p * _BINS).astype(np.int64), _BINS - 1)
        return float(np.abs(np.bincount(bins, gap, _BINS)).sum() / len(p))


class WatchingPlanner:
    """A planner that asks another and counts what comes back."""

    def __init__(self, planner: DraftPlanner) -> None:
        self.draft_len = planner.draft_len
        self.seen = Watched(*np.zeros((2, planner.draft_len), np.int64))
        self._planner = planner
        self._sure: dict[int, NDArray[np.float64]] = {}

    def choose(self, facts: DraftFacts) -> DraftChoice:
        """The other's choice."""
        return self._planner.choose(facts)

    def report(self) -> dict[str, float]:
        """The other's, where it has one."""
        told: dict[str, float] = getattr(self._planner, "report", dict)()
        return told

    def observe(self, landed: DraftsLanded) -> None:
        """Count, and hand on."""
        self._planner.observe(landed)
        out, seen = landed.out, self.seen
        for i, generation in enumerate(landed.generations):
            count = int(out.counts[i])
            if not count:
                continue
            ran = int(out.verified[i]) if out.verified is not None and i < landed.decodes else 0
            seen.rounds += ran > 0
            seen.ran[:ran] += 1
            stood = min(count - 1, ran)
            seen.stood[:stood] += 1
            sure = self._sure.get(generation)
            if sure is not None and ran:
                survival = np.cumprod(sure)
                seen.said += [(float(survival[j]), j < stood) for j in range(ran)]
                seen.blocks.append((sure, ran, stood))
            if out.confidence is not None:
                self._sure[generation] = out.confidence[i].astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeReport:
    """One mode against none. ``parted``: requests whose ids differ, with the first place."""

    mode: str
    parted: tuple[str, ...]
    rounds: int
    drafted: int
    verified: int
    accepted: int
    tokens: int
    by_position: tuple[tuple[int, int], ...]
    calibration: float | None
    seconds: float
    plain_seconds: float

    @property
    def ok(self) -> bool:
        return not self.parted

    @property
    def accepted_length(self) -> float:
        """Tokens of a round that verified drafts, the target's own one counted."""
        return 1 + sum(stood for _, stood in self.by_position) / max(self.rounds, 1)

    def lines(self) -> list[str]:
        """For a terminal."""
        rate = [f"{s / r:.2f}" if r else "-" for r, s in self.by_position]
        given = [r for r, _ in self.by_position]
        stood = [self.rounds, *(s for _, s in self.by_position)]
        conditional = [
            f"{s / min(r, before):.2f}" if min(r, before) else "-"
            for (_, s), r, before in zip(self.by_position, given, stood, strict=False)
        ]
        verdict = "equal" if self.ok else "DIFFERS in " + ", ".join(self.parted)
        error = "no confidences" if self.calibration is None else f"{100 * self.calibration:.1f} %"
        saved = 1 - self.seconds / self.plain_seconds if self.plain_seconds else 0.0
        word = "saved" if saved >= 0 else "lost"
        return [
            f"{self.mode}: {verdict}",
            f"  drafted {self.drafted}, verified {self.verified}, accepted {self.accepted} of "
            f"{self.tokens} tokens; accepted length {self.accepted_length:.2f}",
            f"  acceptance by position {' '.join(rate)}",
            f"  given those before      {' '.join(conditional)}",
            f"  calibration error {error}",
            f"  {self.seconds:.2f} s against {self.plain_seconds:.2f} s without: "
            f"{abs(100 * saved):.0f} % {word}",
        ]


def verify(
    config: EngineConfig,
    tokens: int = 48,
    modes: Sequence[str] = MODES,
    tell: Callable[[str], None] = lambda _: None,
) -> list[ModeReport]:
    """Run the workload without speculation and in each mode; compare ids.

    Raises:
        ConfigError: the configuration does not speculate, or not by the exact rule.
    """
    asked = config.speculation()
    if asked is None:
        raise ConfigError("There is nothing to verify: no speculation.", setting="speculative")
    if asked.acceptance != "exact":
        raise ConfigError(
            f"acceptance={asked.acceptance!r} promises a distribution, not ids.",
            setting="speculative",
            next_step="Verify with acceptance='exact'.",
        )
    tell("without speculation")
    right, plain_seconds, _ = _run(config.model_copy(update={"speculative": None}), tokens)
    reports = []
    for mode in modes:
        tell(mode)
        changed = asked.model_copy(update={"mode": mode})
        got, seconds, seen = _run(config.model_copy(update={"speculative": changed}), tokens)
        assert seen is not None, "a speculating engine has a planner"
        metrics = [metric for _, metric in got]
        reports.append(
            ModeReport(
                mode=mode,
                parted=tuple(
                    f"request {i} at token {_place(mine, theirs)}"
                    for i, ((mine, _), (theirs, _)) in enumerate(zip(got, right, strict=True))
                    if mine != theirs
                ),
                rounds=seen.rounds,
                drafted=sum(m.drafted for m in metrics),
                verified=sum(m.verified for m in metrics),
                accepted=sum(m.accepted for m in metrics),
                tokens=sum(len(ids) for ids, _ in got),
                by_position=tuple(zip(seen.ran.tolist(), seen.stood.tolist(), strict=True)),
                calibration=seen.calibration(),
                seconds=seconds,
                plain_seconds=plain_seconds,
            )
        )
    return reports


def _run(
    config: EngineConfig, tokens: int
) -> tuple[list[tuple[tuple[int, ...], Any]], float, Watched | None]:
    """(ids, metrics) of each request, seconds, and what was seen of drafts."""
    with LLM.from_config(config) as llm:
        prompts = _prompts(llm)
        params = [
            SamplingParams(temperature=float(i % 2), seed=i, max_tokens=tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        llm.generate(prompts[:1], [SamplingParams(max_tokens=8, temperature=0.0)])  # warm
        scheduler = llm.assembly.engine.scheduler
        watching = None
        if scheduler.planner is not None:
            scheduler.planner = watching = WatchingPlanner(scheduler.planner)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        for output in outputs:
            if output.error is not None:
                raise output.error
        found = [(tuple(out.outputs[0].token_ids), out.metrics) for out in outputs]
        return found, seconds, None if watching is None else watching.seen


def usual_prompts(llm: LLM) -> list[Any]:
    """A few texts; ids where there is no tokenizer."""
    if llm.assembly.tokenizer is None:
        cases = workload(llm.assembly.facts.vocab_size)
        return [list(case.ids) for case in cases]
    return list(_TEXTS)


def _prompts(llm: LLM) -> list[Any]:
    """Texts, greedy and sampled each; ids where there is no tokenizer."""
    prompts = usual_prompts(llm)
    if llm.assembly.tokenizer is None:
        return prompts
    return [text for text in prompts for _ in range(2)]


def _place(mine: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
