"""What is measured. Prompts are random ids from a seed, so every engine gets the same ones.

Standard library only: the children of the harness read it in any interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Workload:
    """A batch of requests, all submitted at once, each with a fixed number of output tokens.

    ``measure``: "rate" is generated tokens a second, "first" milliseconds to the first token,
    "gap" milliseconds between tokens, "cpu" CPU seconds. ``without``: engines that cannot do it (a
    prefix that is not shared is another workload).
    """

    name: str
    measure: str
    requests: int
    prompt: int
    output: int
    shared: int = 0
    without: tuple[str, ...] = ()

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """Ids in the middle of the vocabulary, away from special tokens at its ends."""
        draw = random.Random(f"{self.name}-{seed}")
        low, high = vocab // 10, vocab * 9 // 10
        common = [draw.randrange(low, high) for _ in range(self.shared)]
        return [
            common + [draw.randrange(low, high) for _ in range(self.prompt)]
            for _ in range(self.requests)
        ]


WORKLOADS: Final[Mapping[str, Workload]] = {
    w.name: w
    for w in (
        Workload("throughput", "rate", requests=32, prompt=128, output=64),
        Workload("first-token", "first", requests=1, prompt=512, output=1),
        Workload("between-tokens", "gap", requests=1, prompt=32, output=65),
        Workload(
            "shared-prefix",
            "cpu",
            requests=32,
            prompt=32,
            output=32,
            shared=1024,
            without=("transformers",),
        ),
    )
}
UNITS: Final = {
    "rate": "tok/s",
    "first": "ms",
    "gap": "ms",
    "cpu": "CPU s",
    "startup": "s",
    "memory": "MB",
}
HIGHER_IS_BETTER: Final = frozenset({"rate"})
