"""The planner alone: modes, limits, when it stops drafting and tries again, what it reads."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from deepinfer.api.plan import StepOutput
from deepinfer.api.speculative import DraftChoice, DraftFacts, DraftsLanded, PlannerContext
from deepinfer.errors import ConfigError
from deepinfer_speculative.outlook import Outlook
from deepinfer_speculative.pace import Pace, Paces
from deepinfer_speculative.planner import Planner
from deepinfer_speculative.switch import FIRST_WAIT, GLANCE, TRIAL

GAMMA = 4


@dataclass
class View:
    generation: int
    most_drafts: int = 100
    rows_ahead: int = 1


@dataclass
class Device:
    """Steps of ``base`` seconds and ``row`` a row, ``draft`` more where they draft."""

    base: float = 0.01
    row: float = 0.0
    draft: float = 0.0

    def __call__(self, shapes):
        return [self.took(s.requests + s.drafts, s.propose) for s in shapes]

    def took(self, rows, propose):
        return self.base + self.row * rows + self.draft * propose


def context(tmp_path, device, mode="adaptive", acceptance="exact", **options):
    return PlannerContext(
        method="test",
        mode=mode,
        acceptance=acceptance,
        draft_len=GAMMA,
        options=options,
        max_num_seqs=64,
        max_tokens=512,
        identity=repr(device),
        cache_dir=Path(tmp_path),
        measure=device,
    )


class Engine:
    """Requests that decode for ever; drafts stand with probability ``stand`` each."""

    def __init__(self, planner, device, requests=4, stand=0.8, sure=None):
        self.planner, self.device, self.stand, self.sure = planner, device, stand, sure
        self.views = [View(i + 1) for i in range(requests)]
        self.rng = np.random.default_rng(0)
        self.now, self.step, self.drafts, self.tokens = 0.0, 0, False, 0
        self.choices = []
        self.hold = self.held = 0

    def run(self, steps):
        for _ in range(steps):
            self.step += 1
            holds = self.hold > 0 and self.held == len(self.views)
            choice = DraftChoice(0, propose=False) if holds else self.choose()
            self.hold, self.held = self.hold - 1 if holds else choice.hold, len(self.views)
            self.choices.append(choice)
            self.land(choice, not holds)
        return self

    def choose(self):
        return self.planner.choose(
            DraftFacts(
                step=self.step, now=self.now, decoding=self.views, prefill_tokens=0,
                emitting=0, room=512, running=len(self.views),
            )
        )  # fmt: skip

    def land(self, choice, seen=True):
        n, before = len(self.views), self.now
        ran = np.zeros(n, np.int32)
        if self.drafts:
            share = np.arange(n) < choice.rows % n if n else 0
            ran = np.minimum(choice.rows // n + share, GAMMA).astype(np.int32)
        kept = np.minimum(ran, choice.keep // n if choice.keep >= 0 else GAMMA)
        luck = self.rng.random((n, GAMMA)) < self.stand
        stood = np.minimum(np.cumprod(luck, axis=1).sum(1), kept)
        self.now += self.device.took(n + choice.rows, choice.propose)
        self.tokens += n + int(stood.sum())
        self.drafts = choice.propose
        confidence = np.full((n, GAMMA), self.sure, np.float32) if self.sure else None
        out = StepOutput(
            step=self.step,
            tokens=np.zeros((n, 1 + GAMMA), np.int32),
            counts=(1 + stood).astype(np.int32),
            drafts=np.zeros((n, GAMMA), np.int32),
            confidence=confidence,
            drafted=np.full(n, GAMMA if choice.propose else 0, np.int32),
            verified=ran,
        )
        if not seen:
            return
        generations = [v.generation for v in self.views]
        self.planner.observe(
            DraftsLanded(out=out, generations=generations, decodes=n, now=self.now, before=before)
        )

    @property
    def rate(self):
        return self.tokens / self.now


def facts(views, **more):
    given = {"step": 1, "now": 0.0, "prefill_tokens": 0, "emitting": 0, "room": 512, **more}
    return DraftFacts(**{"decoding": views, "running": len(views), **given})


def test_static_verifies_everything_there_is_room_for(tmp_path):
    planner = Planner(context(tmp_path, Device(), "static"))
    views = [View(1, 100), View(2, 2), View(3, 0)]
    assert planner.choose(facts(views))[:3] == (GAMMA + 2, -1, True)
    assert planner.choose(facts(views, room=3)).rows == 3
    assert not list(Path(tmp_path).iterdir()), "it measures nothing"


def test_no_rows_are_planned_for_drafts_that_are_not_there(tmp_path):
    planner = Planner(context(tmp_path, Device(), "static"))
    views = [View(1), View(2)]
    seen = landed(1, [1, 2], [[1.0] * GAMMA] * 2)
    nothing = replace(seen.out, drafted=np.array([0, 3], np.int32))
    planner.observe(replace(seen, out=nothing))
    assert planner.choose(facts(views)).rows == 3


def test_cap_verifies_everything_and_keeps_what_adaptive_would(tmp_path):
    device = Device(base=0.001, row=0.01)
    engine = Engine(Planner(context(tmp_path, device, "cap")), device, stand=0.5).run(60)
    last = engine.choices[-1]
    assert last.rows == 4 * GAMMA and 0 <= last.keep < 4 * GAMMA and last.propose


def test_where_rows_cost_nothing_all_are_verified(tmp_path):
    device = Device(base=0.01)
    engine = Engine(Planner(context(tmp_path, device)), device).run(80)
    glance = [not c.propose for c in engine.choices]
    assert GLANCE <= sum(glance) <= GLANCE + 1, "it looks once what steps without drafts take"
    begins = glance.index(True)
    assert TRIAL < begins and all(glance[begins : begins + sum(glance)])
    drafted = engine.choices[2 : begins + 1] + engine.choices[begins + sum(glance) + 1 :]
    assert all(c.rows == 4 * GAMMA for c in drafted)


def test_where_drafting_does_not_pay_it_stops_and_tries_again_ever_more_rarely(tmp_path):
    device = Device(base=0.1, row=0.001, draft=0.002)
    engine = Engine(Planner(context(tmp_path, device)), device, stand=0.0).run(3000)
    proposing = np.array([c.propose for c in engine.choices])
    assert proposing[:TRIAL].all()
    starts = np.flatnonzero(np.diff(proposing.astype(int)) == 1) + 1
    starts, glance = starts[1:], starts[0]  # it looked once at steps without
    assert len(starts) >= 4, "it tries again"
    assert starts[0] - glance > FIRST_WAIT / 2
    assert (np.diff(starts)[1:] > 1.5 * np.diff(starts)[:-1]).all(), "less and less often"
    assert engine.rate > 0.98 * 4 / device.took(4, False), "never slower than off by 2 %"


@pytest.mark.parametrize("steps", [100, 1000])
def test_where_drafting_is_dear_it_does_not_begin_and_trials_are_rare(tmp_path, steps):
    device = Device(base=0.0, row=0.01, draft=0.02)
    engine = Engine(Planner(context(tmp_path, device)), device, 64, stand=0.5, sure=0.5).run(steps)
    assert not any(c.propose or c.rows for c in engine.choices[:100])
    assert engine.rate > 0.985 * 64 / device.took(64, False)


@pytest.mark.parametrize("stand", [0.05, 0.3, 0.6, 0.9])
def test_with_confidences_the_length_is_right_within_some_tens_of_steps(tmp_path, stand):
    device = Device(base=0.01, row=0.0005, draft=0.001)
    engine = Engine(Planner(context(tmp_path, device)), device, 1, stand, sure=stand).run(30)
    engine.now, engine.tokens = 0.0, 0
    engine.run(2000)
    fixed = [1 / device.took(1, False)]
    for length in range(1, GAMMA + 1):
        tokens = 1 + sum(stand**j for j in range(1, length + 1))
        fixed.append(tokens / device.took(1 + length, True))
    assert engine.rate > 0.95 * max(fixed)
    assert engine.rate > 0.98 * fixed[0]


@pytest.mark.parametrize("stand", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize("row", [0.0001, 0.004])
@pytest.mark.parametrize("scale", [1.0, 0.1], ids=["long", "short"])
def test_adaptive_is_about_the_best_of_off_and_all_fixed_lengths(
    tmp_path, stand, requests, row, scale
):
    device = Device(base=0.01 * scale, row=row * scale, draft=0.002 * scale)
    engine = Engine(Planner(context(tmp_path, device)), device, requests, stand).run(1500)
    fixed = [requests / device.took(requests, False)]
    for length in range(1, GAMMA + 1):
        tokens = requests * (1 + sum(stand**j for j in range(1, length + 1)))
        fixed.append(tokens / device.took(requests * (1 + length), True))
    assert engine.rate > 0.96 * max(fixed)
    assert engine.rate > 0.98 * fixed[0]


def test_another_load_makes_it_try_at_once(tmp_path):
    device = Device(base=0.01, row=0.003, draft=0.005)
    planner = Planner(context(tmp_path, device))
    engine = Engine(planner, device, requests=64, stand=0.7).run(400)
    assert not engine.choices[-1].propose
    engine.views = engine.views[:1]
    engine.run(3)
    assert engine.choices[-1].propose


@dataclass
class Uneven(Device):
    """Takes half of what was measured where steps are small."""

    def took(self, rows, propose):
        return super().took(rows, propose) * (0.5 if rows <= 8 else 1.0)


def test_how_the_table_errs_at_one_load_is_not_held_against_another(tmp_path):
    """Few requests draft, and faster than the table says; many must not begin because of it."""
    shape = {"base": 0.04, "row": 0.0013, "draft": 0.04}
    planner = Planner(context(tmp_path, Device(**shape)))
    device = Uneven(**shape)
    engine = Engine(planner, device, 16, stand=0.7).run(60)
    assert not engine.choices[-1].propose
    many, engine.views = engine.views, engine.views[:1]
    engine.run(60)
    assert engine.choices[-1].propose
    engine.views, began, before = many, engine.now, engine.tokens
    engine.run(300)
    rate = (engine.tokens - before) / (engine.now - began)
    assert rate > 0.98 * 16 / device.took(16, False)


@dataclass
class Dearer(Device):
    """Drafting takes twice what was measured, where steps are large."""

    def took(self, rows, propose):
        return super().took(rows, propose) * (2.0 if propose and rows > 32 else 1.0)


@pytest.mark.parametrize("few", [1, 20])
def test_loads_that_come_in_waves_are_not_tried_at_every_wave(tmp_path, few):
    """Drafts promise something at 64 and keep it not; requests end together, and others come."""
    shape = {"base": 0.012, "row": 0.00001, "draft": 0.008}
    planner, device = Planner(context(tmp_path, Device(**shape))), Dearer(**shape)
    engine = Engine(planner, device, 64, stand=0.7, sure=0.7)
    many, time, tokens, trials = engine.views, 0.0, 0, []
    for _ in range(90):  # trials are spread over 4,100 steps: one costs 2.3 steps' time for 9
        began, before, asked = engine.now, engine.tokens, len(engine.choices)
        engine.run(48)
        time, tokens = time + engine.now - began, tokens + engine.tokens - before
        trials.append(sum(c.propose for c in engine.choices[asked:]))
        engine.views = many[:few]
        engine.run(2)
        engine.views = many
    assert trials[0] >= TRIAL and sum(map(bool, trials)) >= 2, "it tries again"
    assert sum(map(bool, trials)) < 8
    assert tokens / time > 0.97 * 64 / device.took(64, False)


def test_limits_of_requests_are_kept(tmp_path):
    device = Device(base=0.01)
    planner = Planner(context(tmp_path, device))
    views = [View(1, 0), View(2, 1), View(3, 9)]
    assert planner.choose(facts(views)).rows == GAMMA + 1
    assert planner.choose(facts([])).rows == 0


def test_crude_confidences_are_corrected_by_what_stands(tmp_path):
    device = Device(base=0.01)
    planner = Planner(context(tmp_path, device))
    Engine(planner, device, stand=0.3, sure=0.95).run(300)
    survival = planner._outlook.survival([View(1)])[0]
    assert survival.tolist() == pytest.approx([0.3, 0.09, 0.027, 0.0081], abs=0.08), (
        "said 0.95 each, stood 0.3 each"
    )
    assert (np.diff(survival) <= 0).all()


def landed(step, generations, confidence, verified=0):
    n = len(generations)
    return DraftsLanded(
        out=StepOutput(
            step=step,
            tokens=np.zeros((n, 1 + GAMMA), np.int32),
            counts=np.ones(n, np.int32),
            drafts=np.zeros((n, GAMMA), np.int32),
            confidence=np.array(confidence, np.float32),
            verified=np.full(n, verified, np.int32),
        ),
        generations=generations,
        before=0.0,
        decodes=n,
        now=0.0,
    )


@pytest.mark.parametrize("exact", [True, False])
def test_the_ratio_rule_never_looks_at_the_block_that_will_be_verified(exact):
    outlook = Outlook(GAMMA, exact)
    outlook.observe(landed(1, [7], [[0.9] * GAMMA]))
    outlook.observe(landed(2, [7], [[0.1] * GAMMA]))
    newest = outlook.survival([View(7, rows_ahead=1)])[0][0]
    assert newest == pytest.approx(0.1, abs=1e-6), "what is ahead has drafted anew meanwhile"
    live = outlook.survival([View(7, rows_ahead=0)])[0][0]
    assert live == pytest.approx(0.1 if exact else 0.9, abs=1e-6)


def test_what_stood_is_compared_with_what_was_said_of_it_or_not_at_all():
    outlook = Outlook(GAMMA, True)
    outlook.observe(landed(1, [7, 8], [[0.9] * GAMMA] * 2))
    outlook.observe(landed(3, [7, 8], [[0.1] * GAMMA] * 2, verified=GAMMA))
    assert not outlook.seen, "the blocks of step 2 were verified, and nobody has seen them"
    outlook.observe(landed(4, [8, 9], [[0.5] * GAMMA] * 2, verified=GAMMA))
    assert outlook.seen == 1, "of 9 nothing was known"


def test_where_steps_are_short_a_choice_for_many_is_repeated_within_their_limits(tmp_path):
    device = Device(base=0.001, row=0.000001, draft=0.0004)
    planner = Planner(context(tmp_path, device))
    engine = Engine(planner, device, 16, stand=0.7, sure=0.7).run(60)
    right, asked = planner._outlook.survival, []
    planner._outlook.survival = lambda views: asked.append(len(views)) or right(views)
    engine.run(40)
    assert 8 <= len(asked) <= 12 and all(c.propose and c.rows for c in engine.choices[60:])
    many, engine.views = engine.views, engine.views[:13]
    engine.run(1)
    assert 0 < engine.choices[-1].rows <= 13 * GAMMA
    engine.views = many
    assert planner.choose(facts(many, step=engine.step + 1, room=5)).rows <= 5
    engine.views, asked[:] = many[:4], []
    engine.run(12)
    assert len(asked) == 12, "of few, each is looked at"


def test_a_request_of_another_generation_counts_as_usual():
    outlook = Outlook(GAMMA, True)
    outlook.observe(landed(1, [7], [[0.2] * GAMMA]))
    assert outlook.survival([View(8)]).tolist() == outlook.usual(1).tolist()
    assert outlook.survival([View(7)])[0][0] == pytest.approx(0.2)
    outlook.forget([View(8)])
    for number in range(200):
        outlook.observe(landed(2, [100 + number], [[0.2] * GAMMA]))
    outlook.forget([View(8)])
    assert not outlook._rows, "what has gone is forgotten"


class Clock:
    """Steps one after the other, at loads of one sort after the other."""

    def __init__(self):
        self.paces, self.now, self.step = Paces(), 0.0, 0

    def steps(self, sort, count, drafting, seconds):
        pace = self.paces.at(sort)
        for _ in range(count):
            self.step += 1
            self.paces.expect(self.step, self.now, 0.01, pace, drafting)
            before, self.now = self.now, self.now + seconds
            self.paces.landed(self.step, self.now, before)
        return pace


def test_time_is_compared_with_the_table():
    clock = Clock()
    pace = clock.steps(3, 60, True, 0.03)
    assert pace.ratio[True] == pytest.approx(3.0, rel=0.05)
    assert pace.ratio[False] == pytest.approx(pace.ratio[True], rel=0.05), "until it is seen"
    clock.paces.landed(999, 5.0, 4.0)


def test_how_kinds_differ_is_known_by_sort_of_load():
    """The table has steps with drafts of one sort at half of what they take."""
    clock = Clock()
    few, many = clock.steps(8, 9, False, 0.01), clock.steps(0, 20, True, 0.015)
    clock.steps(8, 9, True, 0.02)
    assert few.ratio == {True: pytest.approx(2.0), False: pytest.approx(1.0)}
    assert many.ratio == {True: pytest.approx(1.5), False: pytest.approx(1.5)}
    assert few.compared and not many.compared
    clock.steps(8, 40, False, 0.01)
    clock.steps(8, 120, False, 0.015)  # the machine has become slower
    assert few.ratio[True] == pytest.approx(3.0, rel=0.01), "what slows one kind slows the other"
    new = clock.paces.at(5)
    assert new.ratio == {True: pytest.approx(1.5), False: pytest.approx(1.5)}
    clock.steps(8, 1000, False, 0.015)
    assert not few.compared, "that was long ago"


def test_answers_that_were_taken_late_say_nothing_of_the_device():
    """The last step of a load is taken when the next load comes: seconds later."""
    clock = Clock()
    for step in range(1, 60):
        pace = clock.steps(1, 1, False, 8.0 if step % 9 == 0 else 0.012)
    assert pace.ratio[False] == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize("adds", [-0.4, 0.0, 1.5])
def test_what_draft_rows_add_is_learnt_on_a_machine_that_is_slow_at_times(adds):
    """And that the machine was slow when there were many drafts is not put down to them."""
    rng, pace, slow = np.random.default_rng(0), Pace(), 1.0
    for step in range(1, 1500):
        if step % 40 == 0:
            slow = float(rng.choice([1.0, 1.3, 2.0]))
        share = float(rng.uniform(0.0, 0.2)) + (0.2 if slow > 1.2 else 0.0)
        took = slow * (1.0 + adds * share) * float(rng.lognormal(0.0, 0.05))
        pace.landed(True, took, step, share)
    assert pace.tilt == pytest.approx(adds, abs=0.25)


@dataclass
class Steeper(Device):
    """A row takes three times what was measured, and all steps as long as ``slow`` says."""

    slow: float = 1.0

    def took(self, rows, propose):
        return self.slow * (self.base + 3.0 * self.row * rows + self.draft * propose)


class Changing(Engine):
    """What drafters are sure of changes from step to step."""

    def choose(self):
        self.sure = self.stand = float(self.rng.uniform(0.3, 0.9))
        return super().choose()


def test_a_table_that_has_draft_rows_too_cheap_does_not_run_too_many(tmp_path):
    shape = {"base": 0.03, "row": 0.001, "draft": 0.004}
    planner = Planner(context(tmp_path, Device(**shape)))
    right = Planner(context(tmp_path / "right", Steeper(**shape)))
    found = [Changing(p, Steeper(**shape)).run(1500) for p in (planner, right)]
    rows = [np.mean([c.rows for c in engine.choices[-1000:]]) for engine in found]
    assert rows[0] == pytest.approx(rows[1], rel=0.2) and rows[1] < 3.5 * GAMMA
    assert found[0].rate > 0.98 * found[1].rate


def test_a_trial_that_fell_into_a_quick_time_is_found_out(tmp_path):
    """What steps without drafts took before it was of a slow one."""
    device = Steeper(base=0.03, row=0.0011, draft=0.008)
    engine = Engine(Planner(context(tmp_path, device)), device, 16, stand=0.5, sure=0.5).run(60)
    assert not any(c.propose for c in engine.choices[-20:])
    device.slow = 2.0
    while not engine.choices[-1].propose:
        engine.run(1)
    device.slow, began = 1.0, len(engine.choices)
    engine.run(200)
    assert TRIAL < sum(c.propose for c in engine.choices[began:]) < 50


def test_behind_texts_that_end_together_it_drafts_on_at_once(tmp_path):
    """What is left of them is no reason to stop for long."""
    device = Device(base=0.03, row=0.001, draft=0.02)
    engine = Engine(Planner(context(tmp_path, device)), device, 4, stand=0.8, sure=0.8).run(100)
    stopped = 0
    for wave in range(12):
        engine.views = [View(100 * wave + i, most_drafts=0) for i in range(4)]
        engine.run(12)
        stopped += not engine.choices[-1].propose
        engine.views = [View(100 * wave + i) for i in range(4)]
        began = len(engine.choices)
        engine.run(20)
        assert sum(c.propose for c in engine.choices[began:]) > 9
    assert stopped > 3


def test_a_pause_costs_the_planner_next_to_nothing(tmp_path):
    planner = Planner(context(tmp_path, Device(row=1.0)))
    ranks = []
    usual = planner._outlook.usual
    planner._outlook.usual = lambda n: ranks.append(n) or usual(n)
    choices, step = [], 0
    for _ in range(30):
        step += 1 + (choices[-1].hold if choices else 0)
        choices.append(planner.choose(facts([View(1), View(2)], step=step)))
    assert not any(c.rows or c.propose for c in choices[-3:]), "rows are dear: it pauses"
    assert all(c.hold > 5 for c in choices[-3:]), "and is not asked each time"
    ranks.clear()
    quiet = [planner.choose(facts([View(1), View(2)], step=step + n)) for n in (8, 16, 24)]
    assert not any(c.rows or c.propose for c in quiet) and not ranks
    planner.choose(facts([View(n) for n in range(8)], step=step + 26))
    assert ranks[-1] == 8, "another load is looked at at once"


@pytest.mark.parametrize("impatient", [1, 3, 8])
def test_a_pause_lasts_as_many_steps_however_often_the_planner_is_asked(tmp_path, impatient):
    """While requests wait for a slot it is asked at every step, and the time that trials may cost
    is a share of steps, not of questions.
    """
    device = Device(base=0.1, row=0.001, draft=0.02)
    found = []
    for most in (99, impatient):
        planner = Planner(context(tmp_path, device))
        engine = Engine(planner, device, stand=0.0)
        for _ in range(2000):
            engine.hold = min(engine.hold, most - 1)
            engine.run(1)
        found.append([c.propose for c in engine.choices])
        assert 2000 - 8 < planner.counts["steps"] <= 2000
        assert planner.counts["steps_without_drafting"] <= found[-1].count(False)
    assert found[0] == found[1] and sum(found[0]) < 100


def test_after_a_trial_a_pause_reckons_with_what_it_taught(tmp_path):
    device = Device(base=0.1, row=0.001, draft=0.02)
    planner = Planner(context(tmp_path, device))
    engine = Engine(planner, device, stand=0.0)
    promised = []
    for _ in range(1500):
        engine.run(1)
        if planner._prospects:
            promised.append(planner._prospects[4].rate)
    assert len(set(promised)) >= 3, "each pause works it out anew"
    assert promised[-1] < promised[0], "drafts that never stand promise less and less"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"min_gain": -1}, "min_gain=-1"),
        ({"min_gain": "x"}, "min_gain='x'"),
        ({"walk": "up"}, "walk='up'"),
        ({"costs": 3}, "costs=3"),
        ({"profile_seconds": float("nan")}, "profile_seconds"),
    ],
)
def test_odd_options_are_refused_by_name(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        Planner(context(tmp_path, Device(), **options))


def test_without_a_table_nothing_is_trimmed_and_it_says_so(tmp_path, caplog):
    planner = Planner(context(tmp_path, Device(row=1.0), profile_seconds=0))
    assert "no cost table" in caplog.text
    assert planner.choose(facts([View(1)])).rows == GAMMA


@pytest.mark.parametrize("late", range(12))
@pytest.mark.parametrize("drafting", [False, True])
def test_one_answer_that_came_late_moves_no_ratio_far(late, drafting):
    """Whenever it comes, the first of its sort included: trials would be given up for good."""
    clock = Clock()
    for step in range(200):
        kind = drafting if step == late else step % 5 == 0
        sort = step // 40 % 2
        pace = clock.steps(sort, 1, kind, 35.0 if step == late else 0.01)
        assert all(0.24 < ratio < 4.1 for ratio in pace.ratio.values())
    for sort in range(2):
        assert clock.paces.at(sort).ratio == {True: pytest.approx(1), False: pytest.approx(1)}


@dataclass
class Disturbed(Device):
    """Everything takes ``times`` as long until ``until``, the simulator's seconds."""

    times: float = 1.0
    until: float = 0.0
    engine: Engine | None = None

    def took(self, rows, propose):
        slow = self.engine is not None and self.engine.now < self.until
        return super().took(rows, propose) * (self.times if slow else 1.0)


@pytest.mark.parametrize("steps", [5, 8, 12, 16, 20, 40, 300])
@pytest.mark.parametrize("times", [0.4, 3.0, 8.0])
def test_a_machine_that_was_busy_at_first_is_no_reason_against_drafts(tmp_path, steps, times):
    """Steps of one kind may fall into that time, and those of the other behind it."""
    shape = {"base": 0.02, "row": 0.0004, "draft": 0.004}
    planner = Planner(context(tmp_path, Device(**shape)))
    device = Disturbed(**shape, times=times, until=steps * 0.024 * times)
    engine = device.engine = Engine(planner, device, 1, stand=0.7, sure=0.7)
    engine.run(600)
    began, before = engine.now, engine.tokens
    engine.run(400)
    assert sum(c.propose for c in engine.choices[600:]) > 380
    assert (engine.tokens - before) / (engine.now - began) > 1.6 / device.took(1, False)


@pytest.mark.parametrize("seed", range(8))
def test_steps_at_which_requests_come_and_go_are_no_measure(tmp_path, seed):
    """One of four ends every few steps and another comes, and answers are taken late then; when
    nobody comes any more, three go on as they should.
    """
    shape = {"base": 0.001, "draft": 0.0004}
    planner = Planner(context(tmp_path, Device(**shape)))
    rng, even = np.random.default_rng(seed), Device(**shape)
    engine = Engine(planner, even, 4, stand=0.6, sure=0.6).run(20)
    four = engine.views
    for _ in range(40):
        engine.views, engine.device = four[:3], Device(**shape)
        for _ in range(2):
            late = 3.0 * float(rng.random())
            engine.device = Device(base=0.001 * late, draft=0.0004 * late)
            engine.run(1)
        engine.views, engine.device = four, even
        engine.run(12)
    engine.views, began = four[:3], len(engine.choices)
    engine.run(60)
    assert sum(c.propose for c in engine.choices[began:]) >= 60 - 2 * GLANCE


@dataclass
class SlowDrafts(Device):
    """Drafting takes four times as long up to ``until``, the simulator's steps."""

    until: int = 0
    engine: Engine | None = None

    def took(self, rows, propose):
        busy = propose and self.engine is not None and self.engine.step <= self.until
        return super().took(rows, propose) * (4.0 if busy else 1.0)


@pytest.mark.parametrize("until", [20, 100])
def test_one_trial_on_a_busy_machine_does_not_end_drafting_for_thousands_of_steps(tmp_path, until):
    """What trials seem to cost is what was busy."""
    shape = {"base": 0.038, "draft": 0.012}
    planner = Planner(context(tmp_path, Device(**shape)))
    device = SlowDrafts(**shape, until=until)
    engine = device.engine = Engine(planner, device, 4, stand=0.7, sure=0.7)
    engine.run(1200)
    assert not all(c.propose for c in engine.choices[:100]), "it stopped"
    assert sum(c.propose for c in engine.choices[-400:]) > 380


@dataclass
class Returning(Device):
    """The first step that drafts behind a pause takes as long as ``more`` others: what waited is
    written then, which no table knows of.
    """

    more: int = 0
    drafted: bool = True

    def took(self, rows, propose):
        behind, self.drafted = propose and not self.drafted, propose
        return super().took(rows, propose) + self.more * self.base * behind


@pytest.mark.parametrize("more", [0, 6, 20])
@pytest.mark.parametrize("base", [0.002, 0.03])
def test_trials_cost_what_they_were_seen_to_cost(tmp_path, base, more):
    """Drafts never pay, and how much a trial loses shows in the trial alone."""
    shape = {"base": base, "draft": base}
    planner = Planner(context(tmp_path, Device(**shape)))
    device = Returning(**shape, more=more)
    engine = Engine(planner, device, 4, stand=0.1, sure=0.9).run(600)
    began, before = engine.now, engine.tokens
    engine.run(6000)
    assert any(c.propose for c in engine.choices[600:]), "it tries again"
    rate = (engine.tokens - before) / (engine.now - began)
    assert rate > 0.99 * 4 / base


class WithPrompts(Engine):
    """Prompts run beside every step."""

    def choose(self):
        return self.planner.choose(
            facts(self.views, step=self.step, now=self.now, prefill_tokens=9)
        )


@pytest.mark.parametrize("dear, pays", [(0.3, True), (3.0, False)])
def test_where_prompts_run_in_every_step_time_is_learnt_all_the_same(tmp_path, dear, pays):
    shape = {"base": 0.02, "row": 0.0001, "draft": 0.02}
    planner = Planner(context(tmp_path, Device(**shape)))
    engine = WithPrompts(planner, Device(**{**shape, "draft": 0.02 * dear}), 4, stand=0.6, sure=0.6)
    engine.run(400)
    drafts = [c.propose for c in engine.choices[-200:]]
    assert sum(drafts) > 180 if pays else sum(drafts) < 20


def test_a_plan_that_came_to_nothing_is_no_step(tmp_path):
    """The same step may be planned again, with a prompt in it."""
    planner = Planner(context(tmp_path, Device(base=0.01)))
    for step in range(1, 40):
        now = 0.1 * step
        planner.choose(facts([View(1)], step=step, now=now))
        planner.choose(facts([], step=step, now=now, prefill_tokens=300, emitting=1))
        out = replace(landed(step, [1], [[0.5] * GAMMA]), now=now + 0.09, before=now)
        planner.observe(out)
    assert planner._switch.pace.ratio == {True: 1.0, False: 1.0}
    assert not planner._switch.paid, "nor is it one of a trial"
