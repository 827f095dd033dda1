"""Launches of DeepSeek-V4.1's ops at the shapes of the released model, four experts for 384."""

from functools import partial

import torch
from deepinfer.api.model import DeviceBatch, StepRequests
from deepinfer.ops.reference.hyper import HyperParams
from deepinfer.ops.reference.latent import Window
from deepinfer.ops.reference.sparse import Blocks, Picks
from deepinfer_backend_cuda import hyper, index, latent, moe, scaled, sparse
from deepinfer_backend_cuda.kernels import scaled as kernels
from registry import SM90, SM100, Launch

BF, U8 = torch.bfloat16, torch.uint8
HIDDEN, INNER, EXPERTS, CHOSEN = 5120, 2304, 4, 6
ROWS = (1, 32, 64, 128, 256)
MATRICES = ((1792, HIDDEN), (32768, HIDDEN // 4))
TOKENS = (1, 12, 40, 256)
"""That are sent to experts."""
WHOLE = {SM90: frozenset({"HGMMA"}), SM100: frozenset({"UTCHMMA"})}

WARPS = {SM90: frozenset({"HMMA"}), SM100: frozenset({"HMMA"})}
TIGHT = {
    "product_kernel": {SM100: 8},
    "gated_kernel": {SM100: 216},
    "sparse_kernel": {SM90: 144},
}
"""Tiles at 255 registers: what ptxas spills there, so that more is noticed."""


def launches():
    yield from numbers()
    yield from products()
    yield from experts()
    yield from routes()
    yield from grouped()
    yield from attention()
    yield from latents()
    yield from indexer()
    yield from streams()


def kept(n, k, kind, lead=()):
    """A kept weight whose words nobody reads."""
    rows, columns, per = -(-n // 64), -(-k // 128), 2 if kind == "fp8" else 1
    words = torch.empty(*lead, rows, columns, per * 1024, dtype=torch.int32)
    scales = torch.empty(*lead, rows, columns, 64, dtype=torch.int32)
    shape = torch.Size((*lead, n, k))
    found = kernels.PAIRED if kind == "paired" else scaled.KINDS[kind]
    return scaled.KeptWeight(words, scales, shape, found.value)


def numbers():
    x = torch.zeros(5, HIDDEN, dtype=BF)
    for kind in ("fp8", "mxfp4", "nvfp4"):
        rows = torch.zeros(5, 512, dtype=BF)
        yield Launch(f"quantize {kind}", partial(scaled.quantize, x, kind))
        yield Launch(f"pack_rows {kind}", partial(scaled.pack_rows, rows, kind))
        size = {"fp8": 528, "mxfp4": 272, "nvfp4": 288}[kind]
        records = torch.zeros(5, size, dtype=U8)
        yield Launch(f"unpack_rows {kind}", partial(scaled.unpack_rows, records, kind, BF))
    yield Launch("gated_quantize", partial(scaled.gated_quantize, x, 10.0))


def products():
    for m in ROWS:
        for n, k in MATRICES:
            x = torch.zeros(m, k, dtype=BF)
            run = partial(scaled.product, x, kept(n, k, "fp8"))
            yield Launch(f"scaled_linear {m}x{n}x{k}", run, {"product_kernel": WHOLE})
    w = kept(1792, HIDDEN, "fp8")
    yield Launch("decode", partial(scaled.decode, w))


def experts():
    for kind in ("mxfp4", "paired"):
        gate_up = kept(2 * INNER, HIDDEN, kind, (EXPERTS,))
        down = kept(HIDDEN, INNER, kind, (EXPERTS,))
        for tokens in TOKENS:
            x = torch.zeros(tokens, HIDDEN, dtype=BF)
            ids = torch.zeros(tokens, CHOSEN, dtype=torch.int32)
            run = partial(moe.scaled_moe, x, ids, ids.float(), gate_up, down, EXPERTS, 10.0)
            needs = {"product_kernel": WHOLE, "gated_kernel": WHOLE}
            yield Launch(f"scaled_moe {kind} {tokens}", run, needs, TIGHT)


def routes():
    logits, bias = torch.zeros(5, 384), torch.zeros(384)
    yield Launch("route", partial(moe.route, logits, bias, CHOSEN, "sqrtsoftplus", True, 1.5))


def grouped():
    x, w = torch.zeros(5, 64), torch.zeros(3, 32, 64)
    offsets = torch.zeros(4, dtype=torch.int64)
    yield Launch("grouped_linear float32", partial(moe.grouped_linear, x, w, offsets))
    x, w = torch.zeros(99, 64, dtype=BF), torch.zeros(3, 256, 64, dtype=BF)
    yield Launch("grouped_linear", partial(moe.grouped_linear, x, w, offsets))


def batch(tokens, requests, pages=128):
    """A step of ``requests`` texts of equal length."""
    long = torch.zeros(tokens, dtype=torch.int64)
    each = torch.zeros(requests, dtype=torch.int64)
    return DeviceBatch(
        ids=long,
        positions=long,
        row_of_token=long,
        kv_slots=long,
        attn=None,
        logit_rows=long,
        requests=StepRequests(
            cu_q=torch.zeros(requests + 1, dtype=torch.int32),
            starts=each,
            block_table=torch.zeros(requests, pages, dtype=torch.int32),
            blocks=each,
            floors=each,
        ),
    )


def attention():
    ring, own = torch.zeros(4, 193, 528, dtype=U8), torch.zeros(512, 512, dtype=BF)
    cache, sink = torch.zeros(9, 32, 288, dtype=U8), torch.zeros(64)
    for tokens, requests in ((1, 1), (512, 1)):
        at = batch(tokens, requests)
        window = Window(own[:tokens], ring, at, 128, False)
        entries = torch.zeros(tokens, 512, dtype=torch.int32)
        q = torch.zeros(tokens, 64, 512, dtype=BF)
        for with_cache in (False, True):
            more = (cache, entries) if with_cache else ()
            run = partial(sparse.latent_attention, q, window, at, sink, 0.04, *more)
            needs = {"sparse_kernel": WHOLE if tokens > 4 else WARPS}
            yield Launch(f"latent_attention {tokens} {with_cache}", run, needs, TIGHT)


def latents():
    cache = torch.zeros(9, 32, 288, dtype=U8)
    at, angles = batch(9, 2), torch.zeros(99, 64)
    u, state = torch.zeros(9, 512), torch.zeros(4, 2, 1024)
    yield Launch("compress", partial(latent.compress, u, u, state, at))
    yield Launch("places", partial(latent.places, at, 193, 2, True, True))
    q, x, w = torch.zeros(9, 64, 512, dtype=BF), torch.zeros(9, 512, dtype=BF), torch.zeros(512)
    yield Launch("turn", partial(latent.turn, q, at.positions, angles))
    yield Launch("norm_turn", partial(latent.norm_turn, x, w, 1e-6, at.positions, angles, 1, "own"))
    yield Launch("norm_quantize", partial(latent.norm_quantize, x, w, 1e-6))
    yield Launch("latent_write", partial(latent.latent_write, x, cache, at.kv_slots, "nvfp4"))


def indexer():
    keys = torch.zeros(9, 64, 68, dtype=U8)
    for tokens, requests in ((2, 2), (64, 1)):
        at = batch(tokens, requests)
        q, w = torch.zeros(tokens, 32, 128, dtype=BF), torch.zeros(tokens, 32)
        search = partial(index.select_sparse, q, w, keys, at, 1, 512)
        needs = {"index_score_kernel": WHOLE}
        yield Launch(f"select_sparse {tokens}", partial(search, Blocks(2048, 8)), needs)
        kept = Picks(q.int(), torch.zeros(tokens, 2048, dtype=torch.int32))
        yield Launch(f"select_sparse {tokens} among", partial(search, None, kept, 8), needs)


def streams():
    fn = hyper.MixWeight(torch.zeros(3, 24, 4 * HIDDEN, dtype=BF))
    scale, base = torch.zeros(3), torch.zeros(24)
    for tokens in (1, 1024):
        x = torch.zeros(tokens, 4, HIDDEN, dtype=BF)
        params = HyperParams(fn, scale, base, 20, 1e-6, x[0, 0], 1e-20)
        pre = torch.zeros(tokens, 4)
        yield Launch(f"hyper_open {tokens}", partial(hyper.hyper_open, x, pre, params))
    yield Launch("hyper_collapse", partial(hyper.hyper_collapse, x, pre))
    comb = torch.zeros(1024, 4, 4)
    yield Launch("hyper_merge", partial(hyper.hyper_merge, x, x[:, 0], pre, comb))
    gate = partial(hyper.engram_gate, x, x, x[:, 0], x[0], x[0], 1e-20)
    yield Launch("hyper engram_gate", gate)
