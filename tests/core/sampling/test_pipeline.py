"""The stages: what each does, in which order, and with whose history."""

import math

import numpy as np
import pytest
import torch
from deepinfer.api.plan import Fault, RowParams
from deepinfer.api.sampler import SampleRows
from deepinfer.ops.table import OpSet
from deepinfer.sampling.pipeline import Lines, LogitsPipeline, Stages, gather_stages

INF = math.inf
CPU = torch.device("cpu")


def sample_rows(slot, position):
    """Where lines stand; the draw itself is not run here."""
    floats = torch.ones(len(slot))
    return SampleRows(
        slot=slot,
        position=position,
        seed=slot,
        temperature=floats,
        top_k=slot,
        top_p=floats,
        min_p=floats,
        filtered=False,
        greedy=False,
    )


def run(logits, texts, params, *, drafts=None, bitmask=None, index=None, never=-1):
    """Stages on one row per text; with drafts, row r has a line more for each of them."""
    drafts = drafts or [[]] * len(texts)
    width = 1 + max(map(len, drafts))
    table = torch.zeros((len(texts), 40), dtype=torch.int32)
    grid, owner, position = torch.full((len(texts), width), -1), [], []
    for r, (text, more) in enumerate(zip(texts, drafts, strict=True)):
        table[r, : len(text) + len(more)] = torch.tensor([*text, *more], dtype=torch.int32)
        for j in range(1 + len(more)):
            grid[r, j] = len(owner)
            owner.append(r)
            position.append(len(text) + j)
    owner, position = torch.tensor(owner), torch.tensor(position)
    lines = Lines(
        sample=sample_rows(owner, position),
        grid=grid,
        owner=owner,
        stages=gather_stages(params, logits.shape[1], CPU),
        text=table,
        longest=int(position.max()),
    )
    return LogitsPipeline(OpSet({}, "test"), never).apply(logits, lines, bitmask, index)


def mask(vocab, *rows):
    words = np.zeros((len(rows), -(-vocab // 32)), np.uint32)
    for r, ids in enumerate(rows):
        for v in ids:
            words[r, v // 32] |= 1 << (v % 32)
    return torch.from_numpy(words.view(np.int32))


def test_nobody_uses_anything():
    assert gather_stages([RowParams(3), RowParams(1)], 9, CPU) == Stages()
    z = torch.randn(2, 9)
    before = z.clone()
    assert run(z, [[1, 2, 3], [4]], [RowParams(3), RowParams(1)]).tolist() == [0, 0]
    assert torch.equal(z, before)


def test_bias_comes_before_the_penalty():
    """Repetition divides a logit that the bias made positive: (−1 + 5) / 2, not −1·2 + 5."""
    z = torch.full((1, 4), -1.0)
    run(z, [[2]], [RowParams(1, logit_bias=((2, 5.0),), repetition_penalty=2.0)])
    assert z.tolist() == [[-1, -1, 2.0, -1]]


def test_allowed_ids_stand_whatever_the_bias():
    z = torch.zeros(2, 70)
    params = [RowParams(1, allowed_token_ids=(3, 69), logit_bias=((5, 50.0),)), RowParams(1)]
    run(z, [[1], [1]], params)
    assert torch.nonzero(z[0] > -INF)[:, 0].tolist() == [3, 69]
    assert (z[1] == 0).all()


def test_penalties_count_output_only_and_only_for_their_user():
    z = torch.ones(3, 6)
    text = [4, 4, 1, 1, 2]  # prompt 4 4 1, output 1 2
    params = [
        RowParams(3, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0),
        RowParams(3),
        RowParams(3, frequency_penalty=1.0),
    ]
    run(z, [text, text, text], params)
    assert z[0].tolist() == [1, 0.5 - 0.75, 0.5 - 0.75, 1, 0.5, 1]
    assert z[1].tolist() == [1] * 6
    assert z[2].tolist() == [1, 0, 0, 1, 1, 1]


def test_each_draft_line_has_its_own_history():
    z = torch.zeros(5, 6)
    params = [RowParams(1), RowParams(1, frequency_penalty=1.0)]
    run(z, [[0, 1], [0, 3]], params, drafts=[[5], [4, 3]])
    assert (z[:2] == 0).all()
    assert z[2].tolist() == [0, 0, 0, -1, 0, 0]
    assert z[3].tolist() == [0, 0, 0, -1, -1, 0]
    assert z[4].tolist() == [0, 0, 0, -2, -1, 0]


@pytest.mark.parametrize(
    "text, word, banned",
    [
        ([9, 1, 2], (1, 2, 3), [3]),
        ([9, 1, 1], (1, 2, 3), []),
        ([9, 2], (1, 2, 3), []),  # 1 would stand in the prompt
        ([1, 2], (1, 2, 3), []),  # all of it in the prompt
        ([9], (3,), [3]),
        ([9, 1, 2, 1, 2], (1, 2, 1, 2, 0), [0]),
    ],
)
def test_bad_words(text, word, banned):
    z = torch.zeros(1, 10)
    run(z, [text], [RowParams(1, bad_words=(word, (7, 8)))])
    assert torch.nonzero(z[0] == -INF)[:, 0].tolist() == banned


def test_bad_words_see_the_drafts():
    z = torch.zeros(3, 10)
    run(z, [[9, 5]], [RowParams(1, bad_words=((5, 6, 7), (6, 1)))], drafts=[[6, 7]])
    banned = [torch.nonzero(line == -INF)[:, 0].tolist() for line in z]
    assert banned == [[], [1, 7], []]


def test_stop_ids_are_masked_while_the_text_is_short():
    z = torch.zeros(3, 5)
    run(z, [[0, 0, 0]], [RowParams(2, min_len=5, stop_ids=(1, 4))], drafts=[[2, 2]])
    banned = [torch.nonzero(line == -INF)[:, 0].tolist() for line in z]
    assert banned == [[1, 4], [1, 4], []]  # lengths 3 and 4 are short, 5 is enough


def test_the_grammar_comes_last_and_forbids_a_padded_vocabulary():
    z = torch.zeros(3, 40)
    bits = mask(32, [2, 3], [7])
    faults = run(
        z,
        [[0], [0], [0]],
        [RowParams(1, logit_bias=((5, 90.0), (3, 1.0))), RowParams(1), RowParams(1)],
        bitmask=bits,
        index=torch.tensor([0, -1]),
    )
    assert z[0].max() == 1.0 and torch.nonzero(z[0] > -INF)[:, 0].tolist() == [2, 3]
    assert (z[1:] == 0).all() and faults.tolist() == [0, 0, 0]


def test_faults_are_found_per_line():
    z = torch.zeros(4, 33)
    z[1, 32] = math.nan
    z[3, 2] = math.nan  # masked later, and still a broken model
    faults = run(
        z,
        [[0]] * 4,
        [RowParams(1)] * 4,
        bitmask=mask(33, [], [3]),
        index=torch.tensor([2, 3]),
    )
    assert faults.tolist() == [Fault.NONE, Fault.NAN, Fault.NOTHING_ALLOWED, Fault.NAN]


def test_stages_that_leave_nothing():
    z = torch.zeros(1, 4)
    params = [RowParams(1, allowed_token_ids=(2,), min_len=9, stop_ids=(2,))]
    assert run(z, [[0]], params).tolist() == [Fault.NOTHING_ALLOWED]


@pytest.mark.parametrize("bias", [(), ((3, 100.0),)])
def test_an_id_that_is_never_drawn(bias):
    z = torch.zeros(3, 10)
    z[1, 3] = math.nan  # found before it is pushed down
    faults = run(z, [[1], [2], [3]], [RowParams(1, logit_bias=bias)] * 3, never=3)
    assert (z[:, 3] == -INF).all() and (z[:, [0, 9]] == 0).all()
    assert faults.tolist() == [Fault.NONE, Fault.NAN, Fault.NONE]


def test_nothing_but_the_id_that_is_never_drawn():
    z = torch.zeros(1, 10)
    assert run(z, [[1]], [RowParams(1, allowed_token_ids=(3,))], never=3).tolist() == [
        Fault.NOTHING_ALLOWED
    ]
