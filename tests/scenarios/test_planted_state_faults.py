"""What can go wrong with state blocks, planted one by one: the scenarios must notice."""

import dataclasses

from deepinfer.engine import scheduler
from deepinfer.engine.snapshots import Snapshots, Want
from deepinfer.testing.scenarios import make, run_scenario
from deepinfer.testing.stateful import StateExecutor, StateScript


def caught(numbers=range(120), **types):
    """Whether one of these scenarios fails by its tokens."""
    for number in numbers:
        try:
            run_scenario(make(number, stateful=True), True, **types)
        except AssertionError as why:
            assert "got" in str(why), why  # the tokens, not a check of the books
            return True
    return False


def test_without_a_fault_nothing_is_caught():
    assert not caught()


def test_a_restore_that_is_skipped():
    class Fresh(StateExecutor):
        def _forward(self, plan):
            return super()._forward(dataclasses.replace(plan, restores=()))

    assert caught(executor_type=Fresh)


def test_a_save_that_is_one_step_late():
    class Late(StateExecutor):
        def _forward(self, plan):
            works = super()._forward(dataclasses.replace(plan, saves=()))
            self._copy(plan.saves)
            return works

    assert caught(executor_type=Late)


def test_a_hit_at_a_boundary_without_a_snapshot(monkeypatch):
    """It goes on from the snapshot of the page before."""
    right = Snapshots.deepest

    def deepest(self, path, floor):
        depth = right(self, path, floor)
        return depth + 1 if 0 < depth < len(path) else depth

    def restore(self, r):
        node = next(n for n in reversed(r.chain.nodes) if n.block >= 0)
        self._restores.append((node.block, r.slot))

    monkeypatch.setattr(Snapshots, "deepest", deepest)
    monkeypatch.setattr(Snapshots, "restore", restore)
    assert caught()


def test_an_open_group_of_somebody_else():
    class Shared(StateExecutor):
        def _write(self, slot, summary, token, position):
            self.groups[slot] = self.groups[0]
            return super()._write(slot, summary, token, position)

    assert caught(executor_type=Shared)


def test_an_open_group_that_rejected_drafts_have_moved():
    """It takes the last row that was written, not the one of the position before."""

    class Last(StateExecutor):
        last = [0] * 64

        def _write(self, slot, summary, token, position):
            rows = self.groups[slot]
            if position % 2:
                rows[(position - 1) % len(rows)] = self.last[slot]
            result = super()._write(slot, summary, token, position)
            self.last[slot] = rows[position % len(rows)]
            return result

    assert caught(executor_type=Last)


def test_the_floor_of_another_request():
    class Mixed(StateExecutor):
        floor = 0

        def _admit(self, admit):
            before, self.floor = self.floor, admit.floor
            super()._admit(dataclasses.replace(admit, floor=before))

    assert caught(executor_type=Mixed)


def test_state_of_a_text_with_another_floor(monkeypatch):
    monkeypatch.setattr(Snapshots, "usable", lambda *args: True)
    assert caught(range(100, 300))


def test_a_ring_that_is_too_short(monkeypatch):
    slack = property(lambda self: self.page_size + self.draft_len - 2)
    monkeypatch.setattr(StateScript, "slack", slack)
    assert caught()


def test_a_snapshot_of_a_text_that_has_gone_too_far(monkeypatch):
    """What stops inside accepted drafts may have left its last page's window behind."""

    def leaves(self, r, finished):
        boundary = len(r.chain.nodes) * self.page_size
        if self.blocks and r.slot >= 0 and boundary > r.chain.hit:
            self._wants.append(Want(r, r.slot, boundary, r.chain.nodes[-1]))

    monkeypatch.setattr(Snapshots, "leaves", leaves)
    # One scenario in some hundreds shows it, and which one depends on which pages are taken when.
    monkeypatch.setattr(scheduler, "PLENTY", 1 << 30)
    assert caught(range(300, 600))
