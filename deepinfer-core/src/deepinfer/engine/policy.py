"""Who enters and who gives way: the two built-in policies, and the checks of any policy's answers.

A policy sees requests only as :class:`~deepinfer.api.policy.View` and decides three things;
everything else (bounds, pages, rows) stays in ``scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.api.policy import Budget, Policy, StepFacts, View
from deepinfer.errors import PluginError

if TYPE_CHECKING:
    from deepinfer.engine.request import RequestState


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


def checked_order(policy: Policy, waiting: Sequence[RequestState]) -> list[RequestState]:
    """The policy's order; raises and names the policy if it is no permutation."""
    known = {id(r): r for r in waiting}
    answer = [known.pop(id(view), None) for view in policy.order(tuple(waiting))]
    ordered = [r for r in answer if r is not None]
    if known or len(ordered) != len(answer):
        raise _wrong(policy, "order() must return the waiting requests, each exactly once")
    return ordered


def checked_victim(policy: Policy, running: Sequence[RequestState]) -> RequestState:
    """The policy's victim; raises and names the policy if it is none of ``running``."""
    view = policy.victim(tuple(running))
    for r in running:
        if r is view:
            return r
    raise _wrong(policy, f"victim() must return one of the running requests, not {view!r}")


def checked_budget(policy: Policy, facts: StepFacts) -> Budget:
    """The policy's budget, cut to the engine's own limits."""
    asked = policy.budget(facts)
    tokens = max(0, min(asked.tokens, facts.max_tokens))
    return Budget(tokens, min(asked.prefill_tokens, tokens), asked.draft_rows)


def _wrong(policy: Policy, rule: str) -> PluginError:
    return PluginError(
        f"Scheduling policy {type(policy).__name__}: {rule}.", setting="scheduling_policy"
    )
