"""600 random loads, with and without overlap and state, against the naive loop; without torch."""

import subprocess
import sys

import pytest
from deepinfer.engine.snapshots import Snapshots
from deepinfer.testing.scenarios import make, naive, run_many, run_scenario

BLOCK = 30


@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "state"])
@pytest.mark.parametrize("first", range(0, 600, BLOCK))
def test_every_request_equals_the_naive_loop(first, stateful):
    tally = run_many(range(first, first + BLOCK), stateful)
    assert tally.steps > BLOCK
    assert tally.preemptions and tally.cached_tokens and tally.aborts, (
        "the load has become too easy"
    )


def test_tiers_are_read_and_written():
    assert sum(run_scenario(s, True).loads for s in map(make, range(80)) if s.tiers) > 3


def test_every_reason_to_use_a_snapshot_is_met(monkeypatch):
    """Below the floor, under the same one, and exactly although above another."""
    seen, right = set(), Snapshots.restore

    def restore(self, r):
        same = r.chain.nodes[-1].floor == r.floor
        seen.add("below" if r.chain.hit <= r.floor else "same" if same else "exact")
        right(self, r)

    monkeypatch.setattr(Snapshots, "restore", restore)
    run_many(range(60), stateful=True)
    assert seen == {"below", "same", "exact"}


def test_tiers_are_not_asked_for_state():
    """They have pages alone."""
    assert not sum(run_scenario(s, True).loads for s in (make(n, True) for n in range(40)))


def test_the_naive_loop_is_not_trivial():
    answers = [answer for number in range(40) for answer in make(number).answers]
    assert {answer.finish for answer in answers} == {"stop", "length", "error"}
    assert any(isinstance(answer.reason, str) for answer in answers)
    assert any(answer.logprobs for answer in answers)


def test_a_scenario_is_a_function_of_its_number():
    one, two = make(11), make(11)
    assert one == two
    assert one.answers[0] == naive(one.requests[0], one.script)


def test_scenarios_need_no_torch():
    code = (
        "import sys; from deepinfer.testing.scenarios import run_many; run_many(range(2)); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
