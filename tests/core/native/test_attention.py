"""Paged attention: against float64; bit for bit over chunking, batching, pages, threads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

native_ops = pytest.importorskip("deepinfer.native.ops", exc_type=ImportError)

F32, BF16 = torch.float32, torch.bfloat16


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == F32 else torch.int16)


@dataclass
class Cache:
    """Requests of given lengths in shuffled pages; unused slots hold NaN."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]


def make_cache(
    lengths: list[int], hkv: int, d: int, page: int, dtype: torch.dtype, seed: int = 0
) -> Cache:
    torch.manual_seed(99)
    rows = [(torch.randn(n, hkv, d).to(dtype), torch.randn(n, hkv, d).to(dtype)) for n in lengths]
    need = [-(-n // page) for n in lengths]
    total, width = sum(need) + 3, max([*need, 1])
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    k = torch.full((total, page, hkv, d), torch.nan, dtype=dtype)
    v = k.clone()
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    used = 0
    for b, (rk, rv) in enumerate(rows):
        table[b, : need[b]] = order[used : used + need[b]]
        used += need[b]
        at = torch.arange(len(rk))
        k[table[b].long()[at // page], at % page] = rk
        v[table[b].long()[at // page], at % page] = rv
    return Cache(k, v, table, rows)


def i32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(cache: Cache, q: torch.Tensor, q_lengths: list[int], kv: list[int], **kw):
    cu = i32([0, *torch.tensor(q_lengths).cumsum(0).tolist()])
    return native_ops.attention(
        q, cache.k, cache.v, cache.table, i32(kv), cu, q.shape[-1] ** -0.5, **kw
    )


def reference(q, k, v, first: int, window=None, sink=None, softcap=None):
    """One request in float64: q [T, HQ, D] from absolute position ``first`` on."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("thd,shd->hts", q.double(), k) * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * (s / softcap).tanh()
    at, key = first + torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    seen = key <= at
    if window:
        seen &= key > at - window
    s = s.masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    o = torch.einsum("hts,shd->thd", (s - lse[..., None]).exp(), v)
    if sink is not None:
        o = o * torch.sigmoid(lse.T - sink.double())[..., None]
    return o, lse.T


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("hq", "hkv", "d", "page"),
    [
        (9, 3, 64, 16),
        (4, 4, 8, 7),
        (6, 1, 20, 64),
        (8, 2, 128, 16),
        (2, 1, 256, 5),
        (50, 1, 16, 16),
    ],
)
def test_close_to_float64(isa: str, dtype: torch.dtype, hq: int, hkv: int, d: int, page: int):
    kv, q_lengths = [1, 70, 64, 300, 5, 129], [1, 3, 64, 30, 0, 1]
    cache = make_cache(kv, hkv, d, page, dtype)
    q = torch.randn(sum(q_lengths), hq, d).to(dtype)
    sink = torch.randn(hq)
    options = [{"window": 50, "softcap": 3.0}, {}, {"sink": sink}, {"window": 1, "sink": sink}]
    if isa == "baseline":
        options = options[:1]  # slow, and the same templates
    for option in options:
        o, lse = run(cache, q, q_lengths, kv, **option)
        start = 0
        for b, n in enumerate(q_lengths):
            part = q[start : start + n]
            want, want_lse = reference(part, *cache.rows[b], kv[b] - n, **option)
            tol = 2e-5 if dtype == F32 else 2e-2
            torch.testing.assert_close(o[start : start + n].double(), want, rtol=tol, atol=tol)
            torch.testing.assert_close(
                lse[start : start + n].double(), want_lse, rtol=2e-5, atol=2e-5
            )
            start += n


@pytest.mark.parametrize("option", [{}, {"window": 100}, {"sink": True}, {"softcap": 5.0}])
def test_bits_do_not_depend_on_chunks_batch_pages_threads(isa: str, option: dict) -> None:
    hq, hkv, d, length = 6, 2, 32, 600
    if "sink" in option:
        option = {"sink": torch.randn(hq)}
    cache = make_cache([length, 130, 600], hkv, d, 16, F32)
    torch.manual_seed(5)
    q = torch.randn(length, hq, d)
    whole, whole_lse = run(cache, q, [length, 0, 0], [length, 130, 600], **option)
    for sizes in ([1] * 20, [7, 64, 1, 2, 100], [256, 300, 44], [599, 1]):
        at = length - sum(sizes)
        for n in sizes:
            part = q[at : at + n]
            threads = 1 + n % 2
            o, lse = run(cache, part, [n, 0, 0], [at + n, 0, 0], num_threads=threads, **option)
            assert torch.equal(bits(o), bits(whole[at : at + n])), (at, n)
            assert torch.equal(bits(lse), bits(whole_lse[at : at + n]))
            at += n
    # the same row beside others, in other pages of another size, once more alone
    other = torch.randn(31, hq, d)
    for page in (16, 5, 64):
        moved = make_cache([length, 130, 600], hkv, d, page, F32, seed=page)
        batch = torch.cat((q[-3:], other))
        o, lse = run(moved, batch, [3, 30, 1], [length, 130, 600], **option)
        assert torch.equal(bits(o[:3]), bits(whole[-3:]))
        assert torch.equal(bits(lse[:3]), bits(whole_lse[-3:]))


def test_avx2_and_avx512_agree() -> None:
    from deepinfer.native import loader

    cache = make_cache([500], 2, 64, 16, F32)
    q = torch.randn(70, 6, 64)
    results = []
    try:
        for name in ("avx2", "avx512"):
            loader.set_isa(name)
            results.append(run(cache, q, [70], [500]))
    finally:
        loader.set_isa("avx512")
    for a, b in zip(*results, strict=True):
        assert torch.equal(bits(a), bits(b))


def test_rows_that_see_nothing() -> None:
    cache = make_cache([3, 20], 1, 16, 8, F32)
    q = torch.randn(9, 2, 16)
    o, lse = run(cache, q, [5, 2], [3, 20])  # rows 0, 1 before position 0; rows 7, 8 unowned
    for row in (0, 1, 7, 8):
        assert not o[row].any()
        assert bool((lse[row] == -torch.inf).all())
    assert bool(lse[2:7].isfinite().all())
    o, lse = run(cache, q, [0, 0], [0, 0])
    assert not o.any()
    empty, _ = run(cache, q[:0], [0, 0], [3, 20])
    assert empty.shape == (0, 2, 16)


def test_a_later_nan_stays_later(isa: str) -> None:
    cache = make_cache([90], 1, 16, 8, F32)
    q = torch.randn(90, 2, 16)
    clean, _ = run(cache, q, [90], [90])
    cache.k[cache.table[0, 80 // 8], 0] = torch.nan
    cache.v[cache.table[0, 80 // 8], 0] = torch.nan
    o, _ = run(cache, q, [90], [90])
    assert torch.equal(bits(o[:80]), bits(clean[:80]))
    assert o[80:].isnan().all()


def test_int64_lengths_and_strided_queries() -> None:
    cache = make_cache([40], 3, 64, 16, F32)
    fused = torch.randn(4, 15 * 64)
    q = fused[:, : 9 * 64].view(4, 9, 64)
    want, _ = run(cache, q.contiguous(), [4], [40])
    got, _ = native_ops.attention(
        q, cache.k, cache.v, cache.table, torch.tensor([40]), i32([0, 4]), 0.125
    )
    assert torch.equal(got, want)


def test_wrong_arguments() -> None:
    cache = make_cache([40], 3, 16, 16, F32)
    q = torch.randn(2, 9, 16)
    with pytest.raises(ValueError, match="exceed"):
        run(cache, q, [2], [400])
    with pytest.raises(ValueError, match="cu_q"):
        run(cache, q, [3], [40])
    with pytest.raises(ValueError, match="multiple"):
        run(cache, torch.randn(2, 8, 16), [2], [40])
    with pytest.raises(TypeError):
        run(cache, q.double(), [2], [40])
