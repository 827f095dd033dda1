"""Paged attention against float64 loops."""

import numpy as np
import pytest
import torch
from deepinfer.ops.table import OpSet

OPS = OpSet({}, "reference")
PAGE = 4


class Step:
    """Requests with given (query rows, KV length), their cache scattered over pages."""

    def __init__(self, requests, heads=(4, 2), dim=8, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
        self.requests = requests
        widest = max((-(-kv // PAGE) for _, kv in requests), default=0)
        pages = sum(-(-kv // PAGE) for _, kv in requests) + 1
        order = torch.randperm(pages, generator=generator).tolist()
        self.k_cache = torch.full((pages, PAGE, heads[1], dim), torch.nan, dtype=dtype)
        self.v_cache = self.k_cache.clone()
        table = torch.full((len(requests), widest), -1, dtype=torch.int32)
        self.kv = []
        for b, (_, length) in enumerate(requests):
            k, v = draw(length, heads[1], dim), draw(length, heads[1], dim)
            mine = [order.pop() for _ in range(-(-length // PAGE))]
            table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            slots = torch.tensor([mine[p // PAGE] * PAGE + p % PAGE for p in range(length)])
            OPS.kv_write(k, v, self.k_cache, self.v_cache, slots.long())
            self.kv.append((k, v))
        ends = np.cumsum([0] + [q for q, _ in requests])
        self.q = draw(int(ends[-1]) + 2, heads[0], dim)  # two rows that nobody owns
        lengths = torch.tensor([kv for _, kv in requests], dtype=torch.int64)
        cu_q = torch.tensor(ends, dtype=torch.int32)
        self.plan = OPS.plan_attention(table, lengths, cu_q, PAGE)

    def run(self, **how):
        return OPS.attention(self.q, self.k_cache, self.v_cache, self.plan, 0.3, **how)

    def expected(self, window=None, sink=None, softcap=None):
        q = self.q.double().numpy()
        o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        row = 0
        for (q_len, kv_len), (k, v) in zip(self.requests, self.kv, strict=True):
            k, v = k.double().numpy(), v.double().numpy()
            for i in range(q_len):
                p = kv_len - q_len + i
                low = 0 if window is None else max(0, p - window + 1)
                for h in range(q.shape[1]):
                    if p >= low:
                        cached = h // (q.shape[1] // k.shape[1])
                        z = 0.3 * k[low : p + 1, cached] @ q[row, h]
                        z = z if softcap is None else softcap * np.tanh(z / softcap)
                        lse[row, h] = np.log(np.exp(z).sum())
                        o[row, h] = np.exp(z - lse[row, h]) @ v[low : p + 1, cached]
                        if sink is not None:
                            o[row, h] /= 1 + np.exp(sink[h].item() - lse[row, h])
                row += 1
        return o, lse


MIXES = [
    [(1, 1)],
    [(1, 9), (1, 2), (1, 16)],
    [(5, 5), (1, 7), (3, 11), (0, 6), (4, 4)],
    [(3, 2), (1, 0), (2, 0)],
    [],
]
HOW = [
    {},
    {"window": 3},
    {"softcap": 1.5},
    {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"window": 1, "softcap": 0.7, "sink": torch.zeros(4)},
]


@pytest.mark.parametrize("requests", MIXES, ids=str)
@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how) or "plain")
def test_attention(requests, how):
    step = Step(requests)
    o, lse = step.run(**how)
    want_o, want_lse = step.expected(**how)
    np.testing.assert_allclose(o.double().numpy(), want_o, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse.double().numpy(), want_lse, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
def test_heads_share_keys_in_order(heads):
    step = Step([(4, 6), (1, 5)], heads)
    np.testing.assert_allclose(step.run()[0].numpy(), step.expected()[0], rtol=2e-5, atol=2e-6)


def test_bfloat16_is_rounded_once():
    step = Step([(4, 6), (1, 5)], dtype=torch.bfloat16)
    o, lse = step.run()
    want, want_lse = step.expected()
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    np.testing.assert_allclose(o.double().numpy(), want, rtol=2.0**-8, atol=2e-6)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=2e-5, atol=2e-6)


def test_long_chunks_run_in_blocks():
    step = Step([(600, 700)], (1, 1), 4)
    np.testing.assert_allclose(step.run()[0].numpy(), step.expected()[0], rtol=5e-5, atol=5e-6)


def test_a_broken_key_shows_in_the_rows_that_see_it():
    step = Step([(3, 6), (1, 4)])
    step.k_cache[:] = torch.nan
    o, _ = step.run()
    assert o[:4].isnan().all()
    assert (o[4:] == 0).all()


def test_kv_write_skips_and_overwrites():
    k_cache, v_cache = torch.zeros(2, PAGE, 1, 2), torch.zeros(2, PAGE, 1, 2)
    k = torch.arange(6.0).view(3, 1, 2) + 1
    assert OPS.kv_write(k, -k, k_cache, v_cache, torch.tensor([7, -1, 2])) is None
    assert k_cache.view(-1, 2)[[7, 2]].tolist() == [[1, 2], [5, 6]]
    assert torch.equal(v_cache, -k_cache)
    assert int((k_cache != 0).sum()) == 4
    OPS.kv_write(k[:0], k[:0], k_cache, v_cache, torch.tensor([], dtype=torch.int64))
    OPS.kv_write(k, k, k_cache, v_cache, torch.tensor([-1, -1, -1]))
    assert int((k_cache != 0).sum()) == 4
