"""Launches of DeepSeek-V4.1's ops at the shapes of the released model, four experts for 384."""

from functools import partial

import torch
from deepinfer_backend_cuda import moe, scaled
from registry import SM90, SM100, Launch

BF, U8 = torch.bfloat16, torch.uint8
HIDDEN, INNER, EXPERTS, CHOSEN = 5120, 2304, 4, 6
WHOLE = {SM90: frozenset({"HGMMA"}), SM100: frozenset({"UTCHMMA"})}

TIGHT = {"product_kernel": {SM100: 8}, "gated_kernel": {SM100: 216}}
"""Long tiles of experts on SM100, where it was never measured: what ptxas 12.9 spills there."""


def launches():
    yield from numbers()
    yield from products()
    yield from experts()


def kept(n, k, kind, lead=()):
    """A kept weight whose words nobody reads."""
    rows, columns, per = -(-n // 64), -(-k // 128), 2 if kind == "fp8" else 1
    words = torch.empty(*lead, rows, columns, per * 1024, dtype=torch.int32)
    scales = torch.empty(*lead, rows, columns, 64, dtype=torch.int32)
    shape = torch.Size((*lead, n, k))
    return scaled.KeptWeight(words, scales, shape, scaled.KINDS[kind].value)


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
    for m in (1, 32, 64, 128, 256):
        for n, k in ((1792, HIDDEN), (32768, 1280)):
            x = torch.zeros(m, k, dtype=BF)
            run = partial(scaled.product, x, kept(n, k, "fp8"))
            yield Launch(f"scaled_linear {m}x{n}x{k}", run, {"product_kernel": WHOLE})
    w = kept(1792, HIDDEN, "fp8")
    yield Launch("decode", partial(scaled.decode, w))


def experts():
    gate_up = kept(2 * INNER, HIDDEN, "mxfp4", (EXPERTS,))
    down = kept(HIDDEN, INNER, "mxfp4", (EXPERTS,))
    for tokens in (1, 12, 40, 256):
        x = torch.zeros(tokens, HIDDEN, dtype=BF)
        ids = torch.zeros(tokens, CHOSEN, dtype=torch.int32)
        run = partial(moe.scaled_moe, x, ids, ids.float(), gate_up, down, EXPERTS, 10.0)
        needs = {"product_kernel": WHOLE, "gated_kernel": WHOLE}
        yield Launch(f"scaled_moe {tokens}", run, needs, TIGHT)
    logits, bias = torch.zeros(5, 384), torch.zeros(384)
    yield Launch("route", partial(moe.route, logits, bias, CHOSEN, "sqrtsoftplus", True, 1.5))
    x, w = torch.zeros(5, 64), torch.zeros(3, 32, 64)
    offsets = torch.zeros(4, dtype=torch.int64)
    yield Launch("grouped_linear float32", partial(moe.grouped_linear, x, w, offsets))
    x, w = torch.zeros(99, 64, dtype=BF), torch.zeros(3, 256, 64, dtype=BF)
    yield Launch("grouped_linear", partial(moe.grouped_linear, x, w, offsets))
