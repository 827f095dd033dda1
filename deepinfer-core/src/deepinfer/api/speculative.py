"""Speculation: planner (brain half), drafter and verifier (rank half). House section 7.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from deepinfer.api.kv import KVSpec

if TYPE_CHECKING:
    import torch

    from deepinfer.api.model import Taps
    from deepinfer.api.plan import StepOutput
    from deepinfer.api.policy import StepFacts
    from deepinfer.api.sampler import SampleRows


class Drafts(NamedTuple):
    """``ids`` int64[R, γ]; ``confidence`` float32[R, γ] or None."""

    ids: torch.Tensor
    confidence: torch.Tensor | None


class DraftPlanner(Protocol):
    """Decides how many draft rows a step verifies; the text never depends on it."""

    draft_len: int

    def rows(self, facts: StepFacts) -> int: ...

    def observe(self, out: StepOutput) -> None: ...


class Drafter(Protocol):
    """Proposes tokens. ``taps``: layers whose hidden rows it wants."""

    draft_len: int
    taps: tuple[int, ...]
    kv: KVSpec | None

    def allot(self, eligible: torch.Tensor, k: int) -> torch.Tensor: ...

    def commit(self, taps: Taps | None, kept: torch.Tensor) -> None:
        """After every step. ``kept`` bool[T]: which token rows of the step are text now."""
        ...

    def propose(self, anchors: torch.Tensor, slots: torch.Tensor) -> Drafts: ...


class Verifier(Protocol):
    """Logits rows and drafts to emitted tokens."""

    def verify(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        drafts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens int64[R, 1+γ], counts int64[R]."""
        ...
