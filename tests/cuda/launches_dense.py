"""Launches of a dense decoder's step, at the shapes of an 8B and of a 135M model."""

from functools import partial

import torch
from deepinfer_backend_cuda import attention, hopper, linear, rows, sampling
from registry import SM90, SM100, Launch

BF = torch.bfloat16
WARPS = {SM90: frozenset({"HMMA"}), SM100: frozenset({"HMMA"})}
"""Tiles of 16 rows: the instruction of one warp."""
WHOLE = {SM90: frozenset({"HGMMA"}), SM100: frozenset({"UTCHMMA"})}
"""Tiles of 64 rows and more: a warp group's, or tensor memory's."""
PRODUCT = {SM90: frozenset({"HGMMA", "UTMALDG"}), SM100: frozenset({"UTCHMMA", "UTMALDG"})}
"""The same, fed by tensor descriptors."""
COPIED = {SM90: frozenset({"HGMMA", "UTMALDG"})}
"""Kernels for Hopper alone."""
STORED = {SM90: COPIED[SM90] | {"UTMASTG"}}
"""Those that leave storing to the copy engine too."""
TIGHT = {"attention_kernel": {SM90: 32, SM100: 48}, "flash_kernel": {SM90: 72}}
"""Attention stands at 255 registers: what ptxas 12.8 spills there, so that more is noticed. Of
flash_kernel's none lies in the loop over blocks.
"""
HEADS = ((32, 8, 128), (9, 3, 64))
"""Of queries, of the cache; their size."""
TOKENS = ((1, 1), (512, 512), (512, 1))
"""Of a step, and its requests."""
DEPTH = 4096
ROWS = (1, 32, 64, 128, 256, 512)
MATRICES = ((576, 576), (4096, DEPTH), (6144, DEPTH), (28672, DEPTH))
PARTS = ((256,), (128, 64, 32), (128, 64), (32,))
PAGES = ((32, 8, 128, 64), (32, 8, 128, 16), (9, 3, 64, 16))
"""Heads of queries, of the cache; their size; lines of a page."""


def launches():
    yield from attentions()
    yield from products()
    yield from hoppers()
    yield from others()


def attentions():
    for heads, kv_heads, dim in HEADS:
        cache = torch.zeros(4, 16, kv_heads, dim, dtype=BF)
        for tokens, requests in TOKENS:
            cu_q = torch.linspace(0, tokens, requests + 1).int()
            lengths = torch.ones(requests, dtype=torch.int64)
            table = torch.zeros(requests, 64, dtype=torch.int32)
            q = torch.zeros(tokens, heads, dim, dtype=BF)

            def run(q=q, cache=cache, table=table, lengths=lengths, cu_q=cu_q):
                plan = attention.plan_attention(table, lengths, cu_q, 16)
                attention.attention(q, cache, cache.clone(), plan, 0.1)

            needs = {"attention_kernel": WHOLE if tokens > requests else WARPS}
            yield Launch(
                f"attention {heads}/{kv_heads}x{dim} {tokens} of {requests}", run, needs, TIGHT
            )


def products():
    for m in ROWS:
        for n, k in MATRICES:
            x, w = torch.zeros(m, k, dtype=BF), torch.zeros(n, k, dtype=BF)
            run = partial(linear.linear, x, w)
            yield Launch(f"linear {m}x{n}x{k}", run, {"gemm_kernel": PRODUCT})
            yield Launch(
                f"gated {m}x{n // 2}x{k}",
                partial(linear.gated, x, w),
                {"gated_gemm_kernel": PRODUCT},
            )
    x, w = torch.zeros(5, 96), torch.zeros(64, 96)
    yield Launch("linear float32", partial(linear.linear, x, w))
    yield Launch("linear K=99", partial(linear.linear, x[:, :33].to(BF), w[:, :33].to(BF)))


def hoppers():
    """What a Hopper GPU runs in the place of the launches above."""
    for m in (1, 16, 64, 128, 256):
        name = "stream_kernel" if m <= hopper.STREAMED_ROWS else "wide_kernel"
        x, kind = torch.zeros(m, DEPTH, dtype=BF), (SM90,)
        for n, gated in ((576, False), (4096, False), (6144, False), (28672, True)):
            w, y = torch.zeros(n, DEPTH, dtype=BF), torch.zeros(m, n // (1 + gated), dtype=BF)
            run = partial(hopper.product, x, w, None, y, gated)
            yield Launch(f"{name} {m}x{n} gated {gated}", run, {name: COPIED}, targets=kind)
    for tile in (hopper.LOW, hopper.TALL):
        for gated in (False, True):
            x, w = torch.zeros(300, 512, dtype=BF), torch.zeros(1024, 512, dtype=BF)
            y = torch.zeros(300, 1024 // (1 + gated), dtype=BF)
            run = partial(hopper.long, x, w, None, y, gated, tile)
            name = f"long_kernel {tile.parts} parts gated {gated}"
            yield Launch(name, run, {"long_kernel": STORED}, targets=kind)
    run = partial(hopper.product, x, w[:512], y[0], y)
    yield Launch("long_kernel biased", run, {"long_kernel": STORED}, targets=kind)
    x, w = torch.zeros(256, DEPTH, dtype=BF), torch.zeros(4096, DEPTH, dtype=BF)
    y = torch.zeros(256, 4096, dtype=BF)
    for parts in PARTS:
        tile = hopper.Wide(parts, 4)
        run = partial(hopper.wide, x, w, y[0], y.float(), tile=tile)
        yield Launch(f"wide_kernel {parts}", run, {"wide_kernel": COPIED}, targets=kind)
    for heads, kv_heads, dim, page in PAGES:
        cache = torch.zeros(4, page, kv_heads, dim, dtype=BF)
        plan = attention.plan_attention(
            torch.zeros(2, 64, dtype=torch.int32),
            torch.ones(2, dtype=torch.int64),
            torch.tensor([0, 256, 512], dtype=torch.int32),
            page,
        )
        q = torch.zeros(512, heads, dim, dtype=BF)
        assert hopper.flashes(q, cache, cache)
        run = partial(attention._flash, q, cache, cache.clone(), plan, 0.1, None)
        name = f"flash_kernel {heads}/{kv_heads}x{dim} page {page}"
        yield Launch(name, run, {"flash_kernel": COPIED}, TIGHT, targets=kind)


def others():
    x, at = torch.zeros(5, 8192, dtype=BF), torch.zeros(5, dtype=torch.int64)
    cache, angles = torch.zeros(4, 16, 8, 128, dtype=BF), torch.zeros(9, 128)
    qkv, k = torch.zeros(5, 48 * 128, dtype=BF), torch.zeros(5, 8, 128, dtype=BF)
    heads, logits = (32, 8, 128), torch.zeros(5, 50000)
    hot = torch.ones(5), at, torch.ones(5), torch.ones(5)
    step = (x, torch.zeros(5, 3, dtype=torch.int32), at, at, at, torch.zeros(6, dtype=torch.int32))
    yield Launch("stage", partial(rows.stage, step, step))
    yield Launch("rms_norm", partial(rows.rms_norm, x, x[0], 1e-5))
    yield Launch("add_rms_norm", partial(rows.add_rms_norm, x, x, x[0], 1e-5))
    yield Launch("silu_mul", partial(rows.silu_mul, x))
    yield Launch("rope", partial(rows.rope, k, at, angles))
    yield Launch("rope_write", partial(rows.rope_write, qkv, heads, at, angles, (cache, cache), at))
    yield Launch("kv_write", partial(rows.kv_write, k, k, cache, cache, at))
    ints = torch.zeros(2, 9, dtype=torch.int64)
    kept = torch.zeros(9, 2 * 8192, dtype=BF), ints, at[:1].clone()
    yield Launch("append_rows", partial(rows.append_rows, (x, x), (at, at), *kept))
    yield Launch("gumbel", partial(sampling.gumbel_argmax, logits, at.float(), at, at))
    words = torch.zeros(5, 1563, dtype=torch.int32)
    yield Launch("apply_bitmask", partial(sampling.apply_bitmask, logits, words, at))
    yield Launch("filter_top", partial(sampling.filter_top, logits, *hot))
    yield Launch("logprobs", partial(sampling.logprobs, logits, 5, at))
    none = partial(sampling.logprobs, logits, 0, at)
    yield Launch("logprobs of none", none, spills={"score_kernel": {SM90: 8}})
