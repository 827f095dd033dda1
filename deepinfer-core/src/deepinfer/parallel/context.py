"""Contexts: which groups a model's layers may use."""

from __future__ import annotations

from deepinfer.api.parallel import ParallelContext
from deepinfer.parallel.solo import SoloCommunicator


def single() -> ParallelContext:
    """One rank, alone in every group."""
    solo = SoloCommunicator()
    return ParallelContext(tp=solo, ep=solo, cp=solo, dp=solo, world=solo)
