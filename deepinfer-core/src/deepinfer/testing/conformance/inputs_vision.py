"""Cases of the ops that look at images."""

from __future__ import annotations

from typing import Any

from deepinfer.testing.conformance.inputs import case
from deepinfer.testing.conformance.kit import Run


@case("full_attention", "no_rows", given={"rows": 0})
@case("full_attention", "one_row", given={"rows": 1})
@case("full_attention", "odd_rows", given={"rows": 37})
@case("full_attention", "more_than_a_block", given={"rows": 530})
@case("full_attention", "wide_heads", given={"rows": 70, "dim": 64})
def _full_attention(run: Run, rows: int, dim: int = 32) -> Any:
    q, k, v = (run.put(run.draw.normal(rows, 3, dim)) for _ in range(3))
    return run.ops.full_attention(q, k, v, dim**-0.5)


@case("full_attention", "views_of_one_projection")
def _full_attention_fused(run: Run) -> Any:
    """As a fused projection leaves them: not contiguous."""
    q, k, v = run.put(run.draw.normal(40, 3, 2, 32)).unbind(1)
    return run.ops.full_attention(q, k, v, 0.25)
