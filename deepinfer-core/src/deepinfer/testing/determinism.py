"""Does a text depend on what runs beside it? One workload under many conditions, compared bitwise.

Where you are: behind ``deepinfer verify determinism``, usable by plugin authors for a backend of
theirs. ``testing.lab`` runs the conditions and ``testing.trace`` names the first op that differs;
here stand the report, and the self-test that plants faults to see that they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from deepinfer.testing.lab import CASES, CONDITIONS, Condition, Finding, Lab, workload
from deepinfer.testing.trace import rewrap, unfuse

if TYPE_CHECKING:
    from deepinfer.api.executor import ModelFacts
    from deepinfer.config import EngineConfig

_PLANTED: Final = ("rms_norm", "linear", "attention", "gated_mlp", "add_rms_norm")


@dataclass(frozen=True, slots=True)
class Report:
    """All findings for one model, dtype and mode."""

    title: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def table(self) -> str:
        """For a terminal."""
        lines = [self.title]
        lines += [f"  {f.condition:<20} {f.seconds:6.1f} s  {f}" for f in self.findings]
        return "\n".join(lines)


def verify(
    config: EngineConfig,
    conditions: Sequence[Condition] = CONDITIONS,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check a configuration under every condition."""
    tell("loading the model")
    most = max((condition.crowd for condition in conditions), default=0) + CASES
    with Lab(config, tell, max(64, most)) as lab:
        findings = lab.check(workload(lab.facts.vocab_size), conditions)
        return Report(title_of(lab.facts, config), tuple(findings))


def title_of(facts: ModelFacts, config: EngineConfig) -> str:
    """What was checked."""
    mode = "batch-invariant" if config.batch_invariant else "not batch-invariant"
    return f"{facts.architecture} on {facts.backend}, {facts.dtype}, {mode}"


def self_test(
    config: EngineConfig,
    planted: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Finding]:
    """Plant a fault in one op after the other; op → what the checker says of it.

    The faulty op adds a speck of its rows' mean to each row. The checker must go red and name
    just this op (:func:`caught`).
    """
    tell("loading the model")
    found = {}
    with Lab(config, tell) as lab:
        unfuse(lab.ops)  # a fused composite would pass by the faulty op
        cases = workload(lab.facts.vocab_size, length=4)[1:4]
        seen = lab.seen_ops(cases)
        for op in planted or [op for op in _PLANTED if op in seen][:3]:
            tell(f"a fault in {op}")
            undo = rewrap(lab.ops, {op: _neighbourly})
            try:
                found[op] = lab.check(cases, [Condition(name="together")])[0]
            finally:
                undo()
    return found


def caught(op: str, finding: Finding) -> bool:
    """Whether a planted fault was found and named."""
    return bool(finding.cases) and finding.first is not None and finding.first.op == op


def _neighbourly(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The op with a fault: every row takes a speck from the mean of all rows."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        import torch

        result = fn(*args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        speck = 16 * torch.finfo(out.dtype).eps
        with suppress(IndexError):
            out = out + speck * out.mean(0, keepdim=True)
        return (out, *result[1:]) if isinstance(result, tuple) else out

    return faulty
