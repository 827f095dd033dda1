"""Where plans go: :class:`Executor`. The brain and the hands meet here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deepinfer.api.kv import KVSpec

if TYPE_CHECKING:
    from deepinfer.api.backend import OutputFuture
    from deepinfer.api.plan import BatchPlan, RowInputs
    from deepinfer.config import EngineConfig
    from deepinfer.plugins import Resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the brain must know of the loaded model and its memory.

    ``state_blocks``: blocks of the model's state groups: one for each slot, then the snapshots.
    ``image_token``: the id of every position of an image, never sampled; −1: it takes no images.
    ``graph_rows``: steps of at most so many token rows run as graphs, padded to a multiple of their
    requests where they have drafts; 0: none do.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    kv: KVSpec
    fingerprint: str
    dtype: str
    backend: str
    weight_bytes: int = 0
    draft_len: int = 0
    step_tokens: int = 2048
    load_seconds: float = 0.0
    state_blocks: int = 0
    image_token: int = -1
    graph_rows: int = 0


class Executor(Protocol):
    """Runs plans in order. After an error of its own every later call raises that error."""

    def start(self, config: EngineConfig, resolution: Resolution) -> ModelFacts:
        """Load the model and size the KV pool. Blocking."""
        ...

    def agree(self, plan: BatchPlan | None) -> BatchPlan | None:
        """Lockstep of replicas that share experts; identity otherwise."""
        ...

    def forward(self, plan: BatchPlan) -> None:
        """Start a step. Never blocks."""
        ...

    def sample(self, step: int, inputs: RowInputs | None) -> OutputFuture:
        """Sample the step that ``forward`` started. Never blocks; ``result()`` waits.

        If the answer has a method ``launched()``, it waits until the device has all of the step.
        """
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Rare and blocking: one result per rank."""
        ...

    def close(self) -> None:
        """Idempotent. Waits for what runs, then gives everything back."""
        ...
