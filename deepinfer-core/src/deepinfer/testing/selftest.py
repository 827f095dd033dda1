"""A backend's ops against their references, without pytest: what ``deepinfer doctor`` runs.

The cases are the conformance kit's. Only ops that the backend serves itself are examined.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepinfer.testing.conformance import (  # noqa: F401  (declare cases)
    inputs_latent,
    inputs_v41,
    inputs_vision,
)
from deepinfer.testing.conformance.compare import difference, tolerance
from deepinfer.testing.conformance.inputs import CASES, Case
from deepinfer.testing.conformance.kit import Kit, reference_run, tensors


@dataclass(frozen=True, slots=True)
class SelfTest:
    """``wrong``: a sentence for each case that failed; ``left``: cases for which time ran out."""

    ops: int
    ran: int
    left: int
    seconds: float
    wrong: tuple[str, ...]


def check_ops(name: str, seconds: float = 60.0) -> SelfTest:
    """Run every case of the ops that backend ``name`` serves, in rounds over the ops.

    The backend must be able to run here. The first round, one case of each op, is always finished.
    """
    kit, began = Kit(name), time.monotonic()
    try:
        due = list(_due(kit))
        served = {case.op for case, _ in due}
        wrong, ran = [], 0
        for case, dtype in due:
            if ran >= len(served) and time.monotonic() - began > seconds:
                break
            ran += 1
            if said := _wrong(kit, case, dtype):
                wrong.append(said)
    finally:
        kit.device.close()
    took = time.monotonic() - began
    return SelfTest(len(served), ran, len(due) - ran, took, tuple(wrong))


def _due(kit: Kit) -> Iterator[tuple[Case, str]]:
    """A case of each op, then a second one of each, …; those without rows show least: last."""
    by_op: dict[str, list[tuple[Case, str]]] = {}
    for case in sorted(CASES, key=lambda case: case.name == "no_rows"):
        for dtype in case.dtypes:
            known = dtype in kit.dtypes or len(case.dtypes) == 1
            if known and kit.op_set(dtype, False, case.head_dim).origin[case.op] == kit.name:
                by_op.setdefault(case.op, []).append((case, dtype))
    for round_ in range(max(map(len, by_op.values()), default=0)):
        yield from (cases[round_] for cases in by_op.values() if round_ < len(cases))


def _wrong(kit: Kit, case: Case, dtype: str) -> str | None:
    title = f"{case.op} ({case.name}, {dtype})"
    try:
        with torch.inference_mode():
            got = tensors(case.call(kit.run(dtype, head_dim=case.head_dim)))
            want = tensors(case.call(reference_run(dtype)))
    except Exception as why:  # whatever a driver or a compiler can raise
        if case.optional is not None and case.optional in str(why):
            return None
        return f"{title}: {type(why).__name__}: {str(why)[:200]}"
    bound = tolerance(case.op, dtype)
    found = [difference(g, w, bound) for g, w in zip(got, want, strict=True)]
    said = "; ".join(text for text in found if text)
    return f"{title}: {said}" if said else None
