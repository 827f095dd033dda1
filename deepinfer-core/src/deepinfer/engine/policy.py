"""Who enters and who gives way: the two built-in policies. A seam of the scheduler.

A policy sees requests only as :class:`~deepinfer.api.policy.View` and decides three things;
everything else (bounds, pages, rows) stays in ``scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.api.policy import Budget, StepFacts, View


class FCFSPolicy:
    """First come, first served: the latest arrival gives way."""

    def order(self, waiting: Sequence[View]) -> Sequence[View]:
        return sorted(waiting, key=lambda r: r.arrival)

    def victim(self, running: Sequence[View]) -> View:
        return max(reversed(running), key=lambda r: r.arrival)

    def budget(self, facts: StepFacts) -> Budget:
        return Budget(facts.max_tokens, facts.max_tokens, facts.max_tokens)


class PriorityPolicy(FCFSPolicy):
    """Lower numbers are more urgent; among equals, first come, first served."""

    def order(self, waiting: Sequence[View]) -> Sequence[View]:
        return sorted(waiting, key=lambda r: (r.priority, r.arrival))

    def victim(self, running: Sequence[View]) -> View:
        return max(reversed(running), key=lambda r: (r.priority, r.arrival))
