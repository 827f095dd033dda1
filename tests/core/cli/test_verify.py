"""``deepinfer verify determinism``: green where all is well, red and precise where it is not."""

import json
from types import SimpleNamespace

import pytest
import torch
from deepinfer.api.plan import Admit, BatchPlan, RowBlock, RowParams
from deepinfer.config import EngineConfig
from deepinfer.testing import determinism
from deepinfer.testing.determinism import Report
from deepinfer.testing.lab import CONDITIONS, Condition, Finding, Lab, workload
from deepinfer.testing.trace import Difference, Place, Tracer, first_difference, rewrap, watch


@pytest.fixture
def config(tiny_model):
    return EngineConfig.make(model=str(tiny_model), num_threads=1, batch_invariant=True)


def named(*names):
    return [c for c in CONDITIONS if c.name in names]


def test_every_condition_is_there():
    assert {c.name for c in CONDITIONS} >= {
        "crowded",
        "permuted",
        "small chunks",
        "cold prefix cache",
        "warm prefix cache",
        "preempted",
        "no overlap",
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_invariant_engine_is_green(config, dtype):
    report = determinism.verify(
        config.model_copy(update={"dtype": dtype}), named("all at once", "warm prefix cache")
    )
    assert report.ok, report.table()


def test_a_planted_fault_is_found_and_named(config):
    for op, finding in determinism.self_test(config, ("rms_norm", "attention")).items():
        assert determinism.caught(op, finding), (op, str(finding))
        assert op in str(finding)


def test_a_squeeze_that_squeezes_nobody_is_no_proof(config):
    with Lab(config) as lab:
        cases = workload(lab.facts.vocab_size, length=2)[:1]
        (finding,) = lab.check(cases, [Condition(name="preempted", squeeze=True)])
    assert not finding.ok and "nobody was preempted" in str(finding)


def test_the_command_is_green_on_the_tiny_model(shell, monkeypatch):
    monkeypatch.setattr(determinism.verify, "__defaults__", (named("crowded"), lambda _: None))
    done = shell("verify", "determinism", "--json")
    assert done.code == 0
    assert [(row["condition"], row["ok"]) for row in json.loads(done.out)] == [("crowded", True)]


def test_the_command_counts_the_company(shell):
    done = shell("verify", "determinism", "--requests", "8", "--requests", "66", "--json")
    assert done.code == 0
    rows = [(row["condition"], row["ok"]) for row in json.loads(done.out)]
    assert rows == [("8 requests", True), ("66 requests", True)]


def test_the_command_plants_no_faults_in_company(shell):
    assert shell("verify", "determinism", "--requests", "8", "--self-test").code != 0


def test_the_command_is_red_where_something_differs(shell, monkeypatch):
    finding = Finding("crowded", ("short",), Difference("linear", 3, Place(1, 7)))
    report = Report("Toy on cpu", (finding,))
    monkeypatch.setattr(determinism, "verify", lambda config, tell: report)
    done = shell("verify", "determinism")
    assert done.code == 1
    assert "first op: linear (call 3 of a step, position 7)" in done.out
    assert "NOT deterministic" in done.out


def test_the_self_test_is_red_if_a_fault_slips_through(shell, monkeypatch):
    monkeypatch.setattr(determinism, "self_test", lambda config, tell: {"linear": Finding("x")})
    done = shell("verify", "determinism", "--self-test")
    assert done.code == 1 and "MISSED" in done.out


# The microscope.


class Ops:
    origin = {"double": "reference", "total": "reference"}  # noqa: RUF012

    @staticmethod
    def double(x):
        return x * 2

    @staticmethod
    def total(x):
        return x.sum()


def step_of(slots, positions, lines):
    return SimpleNamespace(
        layout=SimpleNamespace(slot=torch.tensor(slots)),
        batch=SimpleNamespace(positions=torch.tensor(positions), logit_rows=torch.tensor(lines)),
    )


def plan_of(**seeds):
    import numpy as np

    admits = tuple(
        Admit(int(slot[1:]), np.zeros(1, np.int32), 9, seed, RowParams(1))
        for slot, seed in seeds.items()
    )
    return BatchPlan(1, admits, RowBlock(np.zeros((0, 5), np.int32)), np.zeros((0, 3), np.int32))


def traced(values, seeds, slots, positions, fault=0.0):
    ops, tracer = Ops(), Tracer()
    undo_fault = rewrap(ops, {"double": lambda name, fn: lambda x: fn(x) + fault})
    undo = watch(ops, tracer)
    tracer.begin_step(plan_of(**seeds), step_of(slots, positions, [len(slots) - 1]))
    ops.total(ops.double(torch.tensor(values)))
    tracer.end_step()
    ops.double(torch.tensor(values))  # outside a step: not seen
    undo()
    undo_fault()
    return tracer


def test_rows_are_known_by_request_and_position():
    one = traced([[1.0], [2.0]], {"s0": 7, "s1": 8}, [0, 1], [4, 5])
    two = traced([[2.0], [9.0], [1.0]], {"s3": 8, "s1": 9, "s2": 7}, [3, 1, 2], [5, 0, 4])
    assert set(one.rows) == {Place(7, 4), Place(8, 5)}
    assert first_difference(one, two) is None
    assert first_difference(one, traced([[1.0], [2.5]], {"s0": 7, "s1": 8}, [0, 1], [4, 5])) == (
        Difference("double", 0, Place(8, 5))
    )
