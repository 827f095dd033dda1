"""A row's result is its own: other rows may be anything, and the row may stand anywhere.

``test_rows_are_independent`` asks for it within tolerances, of every backend. The bitwise tests
ask for it bit for bit, of the ops in ``facts().invariant``, on what ``provide`` returns for an
invariant engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deepinfer.testing.conformance.compare import difference, tolerance
from deepinfer.testing.conformance.draw import Draw
from deepinfer.testing.conformance.kit import Kit, Run, same_bits, tensors
from deepinfer.testing.conformance.pages import Paged
from deepinfer.testing.conformance.rows import BY_ROW, ByRow, Rows
from deepinfer.testing.conformance.rows_v41 import BY_ROW_V41
from deepinfer.testing.conformance.session import kit_of

EVERY = [*BY_ROW, *BY_ROW_V41]
COUNT = 9
BIG_COUNT = 131


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each op and dtype; some ops stand there more than once, with labels."""
    if "by_row" in metafunc.fixturenames:
        kit = kit_of(metafunc.config)
        dtypes, ops = kit.dtypes, frozenset(b.op for b in EVERY)
        if metafunc.function is not test_rows_are_independent:
            ops = kit.claims()
        chosen = [
            pytest.param(b, d, id=_name(b, d))
            for b in EVERY
            if b.op in ops
            for d in (("float32",) if b.logits else dtypes)
        ]
        metafunc.parametrize("by_row, precision", chosen)


def _name(by_row: ByRow, dtype: str) -> str:
    parts = [by_row.op, by_row.label] if by_row.label else [by_row.op]
    return "-".join(parts if by_row.logits else [*parts, dtype])


def take(rows: Rows, index: Sequence[int]) -> Rows:
    """These rows, in this order."""
    return tuple(column[list(index)] for column in rows)


def answers(by_row: ByRow, run: Run, rows: Rows) -> list[Tensor]:
    """Outputs, a row of each for each row of the input."""
    return tensors(by_row(run, rows))


def test_rows_are_independent(kit: Kit, by_row: ByRow, precision: str) -> None:
    """Replace every other row, by large numbers too: the row that stays keeps its result."""
    run, draw = kit.run(precision), Draw(kit.context(precision).dtype)
    rows, strangers = by_row.make(draw, COUNT), by_row.make(draw, COUNT)
    want = answers(by_row, run, rows)
    for row in (0, 4, COUNT - 1):
        for scale in (1, 1000):
            mixed = [_scaled(column, scale) for column in strangers]
            for column, own in zip(mixed, rows, strict=True):
                column[row] = own[row]
            got = answers(by_row, run, tuple(mixed))
            for g, w in zip(got, want, strict=True):
                wrong = difference(g[row], w[row], tolerance(by_row.op, precision))
                assert not wrong, f"row {row} of {by_row.op} depends on other rows: {wrong}"


def _scaled(column: Tensor, scale: int) -> Tensor:
    return column * scale if column.is_floating_point() and column.dim() > 1 else column.clone()


ARRANGEMENTS = {
    "alone": [[i] for i in range(COUNT)],
    "in_chunks": [[0, 1, 2, 3], [4], [5, 6, 7, 8]],
    "backwards": [list(range(COUNT))[::-1]],
    "repeated": [[i] * 33 for i in range(COUNT)],
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_rows_are_bitwise_equal(kit: Kit, by_row: ByRow, precision: str, arrangement: str) -> None:
    """Alone, in chunks, permuted, repeated: the same bits as in the whole batch."""
    run = kit.run(precision, invariant=True)
    rows = by_row.make(Draw(kit.context(precision).dtype), COUNT)
    whole = answers(by_row, run, rows)
    for index in ARRANGEMENTS[arrangement]:
        for got, want in zip(answers(by_row, run, take(rows, index)), whole, strict=True):
            assert same_bits(got, want[list(index)]), f"rows {index} of {by_row.op} differ"


def test_rows_in_a_crowd_are_bitwise_equal(kit: Kit, by_row: ByRow, precision: str) -> None:
    """Among 131 rows, at the beginning, across the middle and at the end."""
    run, draw = kit.run(precision, invariant=True), Draw(kit.context(precision).dtype)
    rows, crowd = by_row.make(draw, COUNT), by_row.make(draw, BIG_COUNT - COUNT)
    alone = answers(by_row, run, rows)
    for begin in (0, 60, BIG_COUNT - COUNT):
        everybody = tuple(
            torch.cat((c[:begin], r, c[begin:])) for c, r in zip(crowd, rows, strict=True)
        )
        for got, want in zip(answers(by_row, run, everybody), alone, strict=True):
            assert same_bits(got[begin : begin + COUNT], want), f"{by_row.op} at row {begin}"


def claimed(kit: Kit, op: str) -> None:
    """Skip where the backend does not claim batch invariance for the op."""
    if op not in kit.claims():
        pytest.skip(f"{op} is not claimed to be invariant")


# Attention: its rows belong to requests, so company, chunks and pages are arranged by request.

REQUESTS = [(1, 1), (1, 40), (7, 50), (33, 33), (2, 17)]


def paged(run: Run, requests: list[tuple[int, int]], seed: int = 5) -> Paged:
    run.draw = Draw(run.dtype, seed)
    return Paged(run, requests)


def ask(run: Run, of: Paged, request: int, begin: int, end: int) -> list[Tensor]:
    """Attention of some rows of one request alone, as a step would hold them."""
    rows, length = of.requests[request]
    first = int(of.cu_q[request])
    table = run.put(of.block_table[request : request + 1])
    lengths = torch.tensor([length - rows + end], dtype=torch.int64)
    cu_q = torch.tensor([0, end - begin], dtype=torch.int32)
    plan = run.ops.plan_attention(table, run.put(lengths), run.put(cu_q), 16)
    q = of.q[first + begin : first + end]
    return tensors(run.ops.attention(q, of.k_cache, of.v_cache, plan, of.scale))


def test_attention_of_a_request_is_independent(kit: Kit, dtype: str) -> None:
    """Each request alone: the same as in the batch, within the tolerances."""
    run = kit.run(dtype)
    batch = paged(run, REQUESTS)
    whole = tensors(batch.attend())
    for request, (rows, _) in enumerate(REQUESTS):
        first = int(batch.cu_q[request])
        for got, want in zip(ask(run, batch, request, 0, rows), whole, strict=True):
            wrong = difference(got, want[first : first + rows], tolerance("attention", dtype))
            assert not wrong, f"request {request} depends on others: {wrong}"


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 33])
def test_attention_is_bitwise_equal_in_chunks(kit: Kit, dtype: str, chunk: int) -> None:
    """A request alone and cut anywhere, decoded one by one too: the bits of the whole batch."""
    claimed(kit, "attention")
    run = kit.run(dtype, invariant=True)
    batch = paged(run, REQUESTS)
    whole = tensors(batch.attend())
    for request, (rows, _) in enumerate(REQUESTS):
        first = int(batch.cu_q[request])
        for begin in range(0, rows, chunk):
            end = min(begin + chunk, rows)
            for got, want in zip(ask(run, batch, request, begin, end), whole, strict=True):
                part = want[first + begin : first + end]
                assert same_bits(got, part), f"request {request}, rows {begin} to {end}"


def test_attention_is_bitwise_equal_wherever_pages_lie(kit: Kit, dtype: str) -> None:
    """The same text in other pages of a larger cache: the same bits."""
    claimed(kit, "attention")
    run = kit.run(dtype, invariant=True)
    batch = paged(run, REQUESTS)
    here = tensors(batch.attend())
    batch.move(spare=7)
    for one, two in zip(here, tensors(batch.attend()), strict=True):
        assert same_bits(one, two)
