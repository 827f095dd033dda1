"""Rows alone, in company, permuted, in chunks, on moved pages, with 1 and 2 threads: equal bits.

Every backend that claims invariance here is held to it: the reference's fixed tiles and, where they
are built, the native kernels.
"""

import importlib.util

import pytest
import torch
from deepinfer.api.backend import OpContext
from deepinfer.ops.backend import ReferenceBackend, build_ops

CPU = torch.device("cpu")
BACKENDS = ["reference", "cpu"]
COUNTS = [1, 2, 7, 31, 32, 33, 64, 70]
MOST = max(COUNTS)
PAGE = 4


def ops_of(backend, dtype):
    if backend == "cpu":
        if importlib.util.find_spec("deepinfer.native._kernels") is None:
            pytest.skip("the native kernels are not built")
        from deepinfer.native.backend import NativeCPUBackend

        made = NativeCPUBackend()
    else:
        made = ReferenceBackend()
    ctx = OpContext(dtype=dtype, device=CPU, invariant=True, page_size=PAGE, head_dim=16)
    return build_ops(made, ctx)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def row_functions(ops, dtype):
    """name -> (rows, function of rows). Odd widths, so that blocks end in the middle of vectors."""
    w = ops.prepare(draw(100, 72, dtype=dtype, seed=1), ("linear",))
    wide = ops.prepare(draw(520, 576, dtype=dtype, seed=2), ("linear",))
    gate_up = ops.prepare(draw(74, 72, dtype=dtype, seed=3, scale=0.2), ("gated_mlp", "linear"))
    down = ops.prepare(draw(72, 37, dtype=dtype, seed=4), ("gated_mlp", "linear"))
    experts = ops.prepare(draw(5, 74, 72, dtype=dtype, seed=5), ("moe", "grouped_linear"))
    back = ops.prepare(draw(5, 72, 37, dtype=dtype, seed=6), ("moe", "grouped_linear"))
    scale, bias = draw(72, dtype=dtype, seed=7), draw(100, dtype=dtype, seed=8)
    x, logits = draw(MOST, 72, dtype=dtype), draw(MOST, 1003, scale=3.0)
    cos_sin, ids = draw(MOST, 16), torch.arange(MOST)

    def choose(rows, score):
        return ops.route(rows, None, 2, score, True, 1.0)

    def mixture(rows):
        return ops.moe(rows, *choose(rows[:, :5].float(), "sigmoid"), experts, back, 5)

    def sample(rows):
        at = torch.arange(len(rows)) * 0 + 7
        return ops.gumbel_argmax(rows, rows[:, 0].abs() + 0.1, at, at)

    def filtered(rows):
        ones = torch.ones(len(rows))
        return ops.filter_top(rows, ones, ones.long() * 40, ones * 0.8, ones * 0.01)

    return {
        "linear": (x, lambda r: ops.linear(r, w, bias)),
        "linear to float32": (x, lambda r: ops.linear(r, w, None, torch.float32)),
        "wide linear": (draw(MOST, 576, dtype=dtype), lambda r: ops.linear(r, wide)),
        "rms_norm": (x, lambda r: ops.rms_norm(r, scale, 1e-5)),
        "long rms_norm": (draw(MOST, 4097, dtype=dtype), lambda r: ops.rms_norm(r, None, 1e-5)),
        "add_rms_norm": (x, lambda r: ops.add_rms_norm(r, r * 2, scale, 1e-5)[0]),
        "silu_mul": (draw(MOST, 38, dtype=dtype), ops.silu_mul),
        "gated_mlp": (x, lambda r: ops.gated_mlp(r, gate_up, down)),
        "moe": (x, mixture),
        "softmax route": (draw(MOST, 37), lambda r: choose(r, "softmax")[1]),
        "sqrtsoftplus route": (draw(MOST, 37), lambda r: choose(r, "sqrtsoftplus")[1]),
        "rope": (draw(MOST, 3, 16, dtype=dtype), lambda r: ops.rope(r, ids[: len(r)] * 0, cos_sin)),
        "gumbel_argmax": (logits, sample),
        "filter_top": (logits, filtered),
        "logprobs": (logits, lambda r: ops.logprobs(r, 5, torch.zeros(len(r)).long())[1]),
        "chosen logprob": (logits, lambda r: ops.logprobs(r, 0, torch.ones(len(r)).long())[2]),
    }


NAMES = sorted(row_functions(ops_of("reference", torch.float32), torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_rows_do_not_see_their_neighbours(backend, dtype, name, rows_apart):
    rows, fn = row_functions(ops_of(backend, dtype), dtype)[name]
    assert len(rows) == MOST
    rows_apart(rows, fn, COUNTS, 3)


class Text:
    """A text's keys, values and queries, to be laid on pages and run in any cut."""

    def __init__(self, ops, dtype, length=150, heads=(6, 2), dim=16):
        self.ops, self.length = ops, length
        self.q = draw(length, heads[0], dim, dtype=dtype, seed=1, scale=2.0)
        self.k = draw(length, heads[1], dim, dtype=dtype, seed=2)
        self.v = draw(length, heads[1], dim, dtype=dtype, seed=3)

    def run(self, chunks, seed=0, company=0, **how):
        """o and lse of the text in chunks, its pages drawn from ``seed``, beside other requests."""
        need = -(-self.length // PAGE)
        pages = torch.randperm(need + 9, generator=torch.Generator().manual_seed(seed))
        table = pages[:need].int()[None].repeat(1 + company, 1)
        shape = (need + 9, PAGE, *self.k.shape[1:])
        caches = [torch.full(shape, torch.nan, dtype=self.k.dtype) for _ in range(2)]
        out, begin = [], 0
        for size in chunks:
            end, at = begin + size, torch.arange(begin, begin + size)
            slots = pages[at // PAGE] * PAGE + at % PAGE
            self.ops.kv_write(self.k[begin:end], self.v[begin:end], *caches, slots)
            others = [(1, begin + 1)] * company  # decodes of the same text, before it
            lengths = torch.tensor([*(kv for _, kv in others), end])
            cu_q = torch.tensor([*range(company + 1), company + size], dtype=torch.int32)
            q = torch.cat((self.q[begin : begin + 1].expand(company, -1, -1), self.q[begin:end]))
            plan = self.ops.plan_attention(table, lengths, cu_q, PAGE)
            got = self.ops.attention(q.contiguous(), *caches, plan, 0.25, **how)
            out.append([part[company:] for part in got])
            begin = end
        assert begin == self.length
        return [torch.cat(parts) for parts in zip(*out, strict=True)]


HOW = [{}, {"window": 37}, {"softcap": 2.0}, {"sink": draw(6)}]


@pytest.mark.parametrize("how", HOW, ids=lambda how: "-".join(how) or "plain")
def test_attention_does_not_see_chunks_pages_or_company(backend, dtype, how, same_bits, threads):
    text = Text(ops_of(backend, dtype), dtype)
    threads(2)
    whole = text.run([150], **how)
    cuts = [[113, *[1] * 20, 17], [7, 1, 120, 22], [127, 2, 21]]
    for chunks in cuts:
        for got, want in zip(text.run(chunks, **how), whole, strict=True):
            same_bits(got, want)
    for other in (text.run([150], seed=5, **how), text.run([40, 110], company=5, **how)):
        for got, want in zip(other, whole, strict=True):
            same_bits(got, want)
    threads(1)
    for got, want in zip(text.run([150], **how), whole, strict=True):
        same_bits(got, want)


def test_plain_torch_is_not_invariant(threads):
    """Why this file is needed. If it is ever skipped, torch has changed, or the machine."""
    threads(2)
    x, w = draw(64, 576), draw(1536, 576, seed=1)
    alone = torch.cat([torch.nn.functional.linear(x[i : i + 1], w) for i in range(64)])
    if torch.equal(torch.nn.functional.linear(x, w), alone):
        pytest.skip("on this machine torch's linear happens to agree")
