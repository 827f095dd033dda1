"""What the engine counts: cumulative :class:`Counters` beside the ``StepStats`` of each step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. ``finished``: by finish reason.

    ``prompt_tokens`` were computed (recomputed ones too), ``cached_tokens`` were not;
    ``output_tokens`` reached their callers; the seconds are host time, and ``wait_seconds`` the
    time that the host stood waiting for the device.
    """

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    plan_seconds: float = 0.0
    collect_seconds: float = 0.0
    output_seconds: float = 0.0
    wait_seconds: float = 0.0
    device_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
