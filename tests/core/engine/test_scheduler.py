"""What enters a plan, in which order, and who gives way."""

from dataclasses import replace

import pytest
from deepinfer.api.plan import DECODE
from deepinfer.api.policy import Budget
from deepinfer.api.speculative import DraftChoice
from deepinfer.engine.policy import FCFSPolicy, PriorityPolicy
from deepinfer.engine.request import Status
from deepinfer.errors import EngineDeadError, PluginError
from deepinfer.testing.fake import FakeExecutor, FakeScript


class Watching(FakeExecutor):
    """Keeps the plans."""

    def __init__(self, script):
        super().__init__(script)
        self.plans = []

    def forward(self, plan):
        self.plans.append(plan)
        super().forward(plan)


def watched(lab, script=None, config=None, **rooms):
    executor = Watching(script or FakeScript())
    return lab.engine(executor=executor, config=config, **rooms), executor.plans


def rows(plan):
    return [(row.start, row.count, row.emits) for row in plan.rows]


def test_a_long_prompt_runs_in_chunks(lab):
    engine, plans = watched(lab, config={"max_num_batched_tokens": 4})
    engine.add(lab.request(prompt=range(1, 11), max_tokens=2))
    lab.run(engine)
    assert [rows(plan) for plan in plans[:4]] == [
        [(0, 4, 0)],
        [(4, 4, 0)],
        [(8, 2, 1)],
        [(DECODE, 1, 1)],
    ]


def test_decodes_come_first_and_prompts_share_what_is_left(lab):
    engine, plans = watched(lab, config={"max_num_batched_tokens": 6})
    engine.add(lab.request("a", (1, 2, 3), max_tokens=6))
    engine.step()
    engine.add(lab.request("b", range(1, 9), max_tokens=2))
    engine.step()
    assert rows(plans[1]) == [(DECODE, 1, 1), (0, 5, 0)]
    assert plans[1].shape == 6


def test_one_step_ahead_runs_no_row_too_many_for_a_limit(lab):
    engine, plans = watched(lab)
    engine.add(lab.request(max_tokens=3))
    lab.run(engine)
    assert [len(plan.rows) for plan in plans] == [1, 1, 1]


def test_a_stop_costs_one_dead_row(lab):
    engine, plans = watched(lab)
    request = lab.request(stop_token_ids=range(1, 17), max_tokens=9)
    engine.add(request)
    ids, last = lab.run(engine)["r"]
    assert last.finish == "stop" and len(plans) == len(ids) + 1


def test_slots_bound_what_runs(lab):
    engine, plans = watched(lab, config={"max_num_seqs": 2})
    for i in range(5):
        engine.add(lab.request(f"r{i}", max_tokens=4, arrival=i))
    assert len(lab.run(engine)) == 5
    assert max(len(plan.rows) for plan in plans) == 2


@pytest.mark.parametrize("plenty", [True, False])
def test_where_pages_are_plenty_the_device_is_rarely_told_of_any(lab, plenty):
    """Texts of all phases; where there are few, a page is given out when it is needed."""
    size, few = FakeScript().page_size, 8 * 7 + 7
    script = FakeScript(num_pages=1000 if plenty else few, max_num_seqs=8)
    engine, plans = watched(lab, script)
    for i in range(8):
        engine.add(lab.request(f"r{i}", range(1, 3 + i), max_tokens=24, seed=i))
    lab.run(engine)
    steady = plans[3:]
    told = [len(plan.pages) for plan in steady]
    assert len(steady) > 20
    assert sum(map(bool, told)) <= len(steady) / size + 1 if plenty else max(told) <= 4
    assert plenty or sum(map(bool, told)) > len(steady) / 2
    for plan in plans:
        where = [tuple(write) for write in plan.pages[:, :2].tolist()]
        assert len(set(where)) == len(where), "each is told once"


def test_first_come_first_served_and_priorities(lab):
    entered = {}
    for policy in (FCFSPolicy(), PriorityPolicy()):
        engine, _ = watched(lab, config={"max_num_seqs": 1}, policy=policy)
        for i, priority in enumerate([2, 1, 0, 1]):
            engine.add(lab.request(f"r{i}", max_tokens=1, arrival=i, priority=priority))
        entered[type(policy)] = list(lab.run(engine))
    assert entered[FCFSPolicy] == ["r0", "r1", "r2", "r3"]
    assert entered[PriorityPolicy] == ["r2", "r1", "r3", "r0"]


@pytest.mark.parametrize("policy, loser", [(FCFSPolicy(), "r1"), (PriorityPolicy(), "r0")])
def test_who_gives_way(lab, policy, loser):
    engine, _ = watched(lab, FakeScript(num_pages=8, max_model_len=32), policy=policy)
    engine.add(lab.request("r0", max_tokens=20, arrival=0, priority=5))
    engine.add(lab.request("r1", (5, 4, 3, 2, 1), max_tokens=20, arrival=1, priority=0))
    found = lab.run(engine)
    assert {name: last.metrics.preemptions > 0 for name, (_, last) in found.items()} == {
        "r0": loser == "r0",
        "r1": loser == "r1",
    }


def test_preemption_changes_no_token(lab):
    alone = {}
    for i in range(4):
        engine, _ = watched(lab)
        engine.add(lab.request(f"r{i}", (i + 1, 2, 3), max_tokens=20, seed=i))
        alone[f"r{i}"] = lab.run(engine)[f"r{i}"][0]
    engine, _ = watched(lab, FakeScript(num_pages=7, max_model_len=28))
    for i in range(4):
        engine.add(lab.request(f"r{i}", (i + 1, 2, 3), max_tokens=20, seed=i, arrival=i))
    crowded = {name: ids for name, (ids, _) in lab.run(engine).items()}
    assert engine.counters.preemptions > 0
    assert crowded == alone


def test_nobody_gives_way_for_pages_that_are_coming_back(lab):
    engine, _ = watched(lab, FakeScript(num_pages=6, max_model_len=24))
    engine.add(lab.request("a", max_tokens=8))
    engine.add(lab.request("b", (5, 4, 3, 2, 1), max_tokens=8, arrival=1))
    engine.step()
    engine.step()
    engine.abort("b")  # its rows are in flight
    assert engine.cache.coming() > 0
    lab.run(engine)
    assert engine.counters.preemptions == 0


def test_a_preempted_request_comes_back_only_when_its_rows_have_arrived(lab):
    script = FakeScript(num_pages=7, max_model_len=28, jitter=0.0)
    engine, _ = watched(lab, script)
    for i in range(3):
        engine.add(lab.request(f"r{i}", (i + 1, 2, 3), max_tokens=20, arrival=i))
    while engine.has_work():
        engine.step()
        for r in engine.scheduler.waiting:
            assert r.status is Status.PREEMPTED or not r.in_flight
        for r in engine.scheduler.running:
            assert r.lo <= r.request.limit and r.lo <= r.hi


def test_drafts_come_out_of_the_budget(lab):
    engine, plans = watched(lab, FakeScript(draft_len=4), {"max_num_batched_tokens": 8})
    for i in range(4):
        engine.add(lab.request(f"r{i}", (i + 1, 2), max_tokens=9))
    lab.run(engine)
    decodes = [p for p in plans if all(row.start == DECODE for row in p.rows)]
    assert all(plan.shape <= 8 for plan in plans)
    full = next(plan for plan in decodes if len(plan.rows) == 4)
    assert full.draft_rows == 4 and {row.count for row in full.rows} == {5}


class Holds:
    """Drafts nothing, and asks not to be asked for a while."""

    def __init__(self, hold, propose=False):
        self.choice = DraftChoice(0, propose=propose, hold=hold)
        self.asked, self.seen = [], []

    def choose(self, facts):
        self.asked.append(facts.step)
        return self.choice

    def observe(self, landed):
        self.seen.append(landed.out.step)
        assert landed.before <= landed.now


def test_a_planner_that_holds_is_asked_and_told_only_of_the_other_steps(lab):
    planner = Holds(3)
    engine, plans = watched(lab, FakeScript(draft_len=4), planner=planner)
    engine.add(lab.request(max_tokens=14))
    lab.run(engine)
    # The first step runs the prompt, so nobody decodes as many as when it was asked.
    assert planner.asked[:4] == [1, 2, 6, 10] and planner.seen[:4] == planner.asked[:4]
    assert not any(plan.draft_rows or plan.propose for plan in plans)
    assert engine.scheduler._unseen <= {len(plans) + 1}, "nothing is kept of steps that have landed"


def test_who_comes_or_goes_ends_a_hold(lab):
    """Who waits for a slot of somebody else does not."""
    planner = Holds(50)
    engine, plans = watched(
        lab, FakeScript(draft_len=4), config={"max_num_seqs": 2}, planner=planner
    )
    for name, most in (("a", 30), ("b", 9), ("c", 5)):  # c waits for b's slot
        engine.add(lab.request(name, max_tokens=most))
    texts = lab.run(engine)
    enters = max(plan.step for plan in plans if any(row.start >= 0 for row in plan.rows))
    alone = 1 + max(plan.step for plan in plans if len(plan.rows) == 2)
    asked = [step for step in planner.asked if step <= len(plans)]
    assert asked[:4] == [1, 2, 3, 4], "two enter, one behind the other: they share a prefix"
    assert asked[4] == enters > 10 and asked[-1] in (alone, alone + 1)
    assert planner.seen == asked and len(asked) < 9
    assert engine.scheduler._unseen <= {len(plans) + 1}
    assert {len(ids) for ids, _ in texts.values()} == {30, 9, 5}


def test_a_planner_that_drafts_next_holds_nothing(lab):
    planner = Holds(50, propose=True)
    engine, plans = watched(lab, FakeScript(draft_len=4), planner=planner)
    engine.add(lab.request(max_tokens=9))
    lab.run(engine)
    assert planner.seen == [plan.step for plan in plans] and set(planner.seen) <= {*planner.asked}


def test_a_planner_decides_how_many_drafts_run(lab):
    class NoDrafts:
        draft_len = 4
        seen = 0

        def choose(self, facts):
            assert facts.step == len(plans) + 1
            return DraftChoice(0)

        def observe(self, landed):
            drafted = landed.out.drafts is not None
            assert len(landed.generations) == drafted * len(landed.out.counts)
            self.seen += 1

    planner = NoDrafts()
    engine, plans = watched(lab, FakeScript(draft_len=4), planner=planner)
    engine.add(lab.request(max_tokens=9))
    lab.run(engine)
    assert {row.count for plan in plans[1:] for row in plan.rows} == {1}
    assert planner.seen == len(plans)


def test_drafts_are_counted(lab):
    engine, plans = watched(lab, FakeScript(draft_len=2))
    engine.add(lab.request(max_tokens=20))
    metrics = lab.run(engine)["r"][1].metrics
    assert metrics.accepted == metrics.output_tokens - len(plans)
    assert metrics.accepted <= metrics.drafted == 2 * (len(plans) - 1)


def test_a_steady_batch_reuses_its_rows(lab):
    engine, plans = watched(lab)
    for i in range(3):
        engine.add(lab.request(f"r{i}", (i + 1, 2), max_tokens=9))
    lab.run(engine)
    assert plans[2].rows is plans[3].rows
    assert not plans[2].rows.array.flags.writeable


class Broken(FCFSPolicy):
    """A policy with one wrong answer."""

    def __init__(self, **wrong):
        self.wrong = wrong

    def order(self, waiting):
        return self.wrong.get("order", super().order)(waiting)

    def victim(self, running):
        return self.wrong.get("victim", super().victim)(running)


@pytest.mark.parametrize(
    "policy, rule",
    [
        (Broken(order=lambda waiting: waiting[:-1]), "order()"),
        (Broken(order=lambda waiting: [waiting[0]] * len(waiting)), "order()"),
        (Broken(order=lambda waiting: [*waiting, object()]), "order()"),
        (Broken(victim=lambda running: None), "victim()"),
        (Broken(victim=lambda running: object()), "victim()"),
    ],
)
def test_a_wrong_policy_is_named(lab, policy, rule):
    engine, _ = watched(lab, FakeScript(num_pages=8, max_model_len=32), policy=policy)
    for i in range(2):
        engine.add(lab.request(f"r{i}", (i + 1, 2, 3), max_tokens=25, arrival=i))
    found = lab.run(engine)
    errors = [last.error for _, last in found.values()]
    assert all(isinstance(error, EngineDeadError) for error in errors)
    cause = errors[0].__cause__
    assert isinstance(cause, PluginError) and cause.setting == "scheduling_policy"
    assert "Broken" in str(cause) and rule in str(cause)


def test_a_policy_may_hold_prompts_back(lab):
    class OneByOne(FCFSPolicy):
        def budget(self, facts):
            return replace(super().budget(facts), prefill_tokens=0 if facts.decoding else 99)

    engine, plans = watched(lab, policy=OneByOne())
    for i in range(3):
        engine.add(lab.request(f"r{i}", (i + 1, 2, 3), max_tokens=4, arrival=i))
    assert len(lab.run(engine)) == 3
    assert not any({row.start == DECODE for row in plan.rows} == {True, False} for plan in plans)


def test_a_budget_is_cut_to_the_engines_own(lab):
    class Greedy(FCFSPolicy):
        def budget(self, facts):
            return Budget(10**9, 10**9, 10**9)

    engine, plans = watched(lab, config={"max_num_batched_tokens": 4}, policy=Greedy())
    engine.add(lab.request(prompt=range(1, 11), max_tokens=2))
    lab.run(engine)
    assert max(plan.shape for plan in plans) == 4
