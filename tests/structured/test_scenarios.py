"""Random engine runs under xgrammar's grammars, against a loop that matches whole texts.

Drafts are part of it: the fake device's drafter is right, wrong from some place on, or wrong.
"""

from __future__ import annotations

import pytest
from deepinfer.testing.scenarios import Tally, make, run_scenario
from grammar_rig import PATTERNS, pattern_grammars


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stateful", [False, True])
def test_constrained_requests_end_as_the_naive_loop_says(overlap, stateful):
    total, ends, drafts = Tally(), {}, 0
    for number in range(40):
        scenario = make(number, stateful, pattern_grammars())
        total.add(run_scenario(scenario, overlap))
        for request, answer in zip(scenario.requests, scenario.answers, strict=True):
            if request.structured is not None:
                kind = answer.finish, type(answer.reason).__name__
                ends[kind] = ends.get(kind, 0) + 1
                drafts += scenario.script.draft_len > 0
    assert total.preemptions and total.cached_tokens and total.aborts
    assert drafts > 30 and len(PATTERNS) > 5
    # Texts that their grammar ended, that a stop text or stop id ended, that were cut off.
    assert min(ends[key] for key in [("stop", "NoneType"), ("stop", "str"), ("length", "NoneType")])
