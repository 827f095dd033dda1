"""The bits of this backend: fixed inputs, what must come out, and who may share a step with whom.

A :class:`Probe` is an op at the shape of a real model, with its reduction order in words. Its
*fingerprint* is a hash of those words and of all output bits; ``golden_bits.json`` beside this file
holds those recorded on a GPU, by compute capability. A compiler that moves one bit, or a kernel
whose order changed while its words did not, is found by ``moved``; rows that depend on their
company by ``unequal``. ``deepinfer doctor`` and the GPU tests ask both.

Inputs are made of integers, exactly representable and over eight binary orders of magnitude, so
they are the same under any version of torch, and no sum of them is exact in another order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources

import torch
from torch import Tensor

from deepinfer_backend_cuda import attention, linear, rows, sampling

BF, F32 = torch.bfloat16, torch.float32
GOLDEN = "golden_bits.json"
COUNTS = (1, 2, 7, 32, 64, 100, 256, 2048)
"""Rows that share a step, in ``unequal``; as far as a probe has so many."""
Run = Callable[[int, int], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Probe:
    """``make(device)`` prepares inputs and gives ``run(begin, end)``: the op on those rows of
    ``rows`` alone; every output's first dimension is rows.
    """

    name: str
    order: str
    rows: int
    make: Callable[[torch.device], Run]

    def fingerprint(self, device: torch.device) -> str:
        """16 hexadecimal digits."""
        return self.digest(self.make(device)(0, self.rows))

    def digest(self, outputs: tuple[Tensor, ...]) -> str:
        """Of the order's words and the outputs' bits."""
        found = hashlib.sha256(self.order.encode())
        for out in outputs:
            found.update(str(out.dtype).encode())
            found.update(out.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return found.hexdigest()[:16]


def values(
    shape: tuple[int, ...],
    seed: int,
    device: torch.device,
    dtype: torch.dtype = BF,
    least: int = -6,
) -> Tensor:
    """±(1 + m)·2^e with ``least`` ≤ e < least + 8, from a hash of the index; exact in ``dtype``."""
    count = 1
    for size in shape:
        count *= size
    z = torch.arange(count, device=device) * 2654435761 + seed * 40503
    for factor in (0x45D9F3B, 0x45D9F3B):
        z = z & 0xFFFFFFFF
        z = (z ^ (z >> 16)) * factor
    z = z & 0xFFFFFFFF
    z = z ^ (z >> 16)
    exponent = ((z >> 1) & 7) + 127 + least
    mantissa = (z >> 4) & 0x7FFFFF if dtype is F32 else ((z >> 4) & 0x7F) << 16
    word = (exponent << 23) | mantissa
    word = torch.where((z & 1) == 1, word - (1 << 31), word)
    return word.to(torch.int32).view(F32).view(shape).to(dtype)


def _linear(device: torch.device, n: int, k: int, dtype: torch.dtype, count: int) -> Run:
    x, w = values((count, k), 1, device, dtype), values((n, k), 2, device, dtype, -11)
    return lambda begin, end: (linear.linear(x[begin:end], w),)


def _rms_norm(device: torch.device, width: int, count: int) -> Run:
    x, w = values((count, width), 3, device), values((width,), 4, device)
    return lambda begin, end: (rows.rms_norm(x[begin:end], w, 1e-5),)


def _add_rms_norm(device: torch.device, width: int, count: int) -> Run:
    x, r = values((count, width), 5, device), values((count, width), 6, device)
    w = values((width,), 7, device)
    return lambda begin, end: rows.add_rms_norm(x[begin:end], r[begin:end], w, 1e-5)


def _silu_mul(device: torch.device, width: int, count: int) -> Run:
    x = values((count, 2 * width), 8, device)
    return lambda begin, end: (rows.silu_mul(x[begin:end]),)


def _rope(device: torch.device, heads: int, dim: int, count: int) -> Run:
    x, angles = values((count, heads, dim), 9, device), values((97, dim), 10, device, F32, -7)
    at = torch.arange(count, device=device) * 31 % 97
    return lambda begin, end: (rows.rope(x[begin:end], at[begin:end], angles),)


def _attention(
    device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype, count: int
) -> Run:
    """Rows are a prompt's tokens: ``run(begin, end)`` is the chunk that ends before ``end``."""
    (hq, hkv, dim), page = heads, 16
    pages = -(-count // page)
    q = values((count, hq, dim), 11, device, dtype, -5)
    k = values((pages, page, hkv, dim), 12, device, dtype, -5)
    v = values((pages, page, hkv, dim), 13, device, dtype)
    table = (torch.arange(pages, device=device) * 7 % pages).int()[None]

    def run(begin: int, end: int) -> tuple[Tensor, ...]:
        cu_q = torch.tensor([0, end - begin], device=device)
        lengths = torch.tensor([end], device=device)
        plan = attention.plan_attention(table, lengths, cu_q, page)
        return attention.attention(q[begin:end], k, v, plan, dim**-0.5)

    return run


def _gumbel(device: torch.device, vocab: int, count: int) -> Run:
    logits = values((count, vocab), 14, device, F32)
    at = torch.arange(count, device=device)
    warm = (at % 3).float() / 2
    return lambda begin, end: (
        sampling.gumbel_argmax(
            logits[begin:end], warm[begin:end], at[begin:end] * 977, at[begin:end]
        ),
    )


_CHAIN = "one float32 accumulator, tensor-core steps of 16 of K ascending, rounded once"
_ADDS = "one float32 accumulator, multiply-adds of K ascending in blocks of 32, rounded once"
_TREE = "one sum over the next power of two of the row's width, divisions rounded, no contraction"
_EACH = "elementwise in float32, no contraction, rounded once"
_PIECES = (
    "pieces of {piece} keys at absolute positions, merged ascending; within one an online softmax "
    "of {block} keys at a time whose sums are chains of {steps}"
)


def _pieces(dim: int, dtype: torch.dtype) -> str:
    steps = "tensor-core steps" if dtype is BF else "multiply-adds"
    block = attention.keys_of(dim, dtype)
    return _PIECES.format(piece=attention.PIECE, block=block, steps=steps)


def probes() -> Iterator[Probe]:
    """Every op that has a kernel, at the shapes of an 8B and of a 135M model."""
    for n, k, count in ((576, 576, 300), (4096, 4096, 2048), (28672, 4096, 300), (4096, 14336, 70)):
        make = partial(_linear, n=n, k=k, dtype=BF, count=count)
        yield Probe(f"linear bfloat16 {n}x{k}", _CHAIN, count, make)
    make = partial(_linear, n=576, k=576, dtype=F32, count=300)
    yield Probe("linear float32 576x576", _ADDS, 300, make)
    for width in (576, 4096):
        yield Probe(f"rms_norm {width}", _TREE, 300, partial(_rms_norm, width=width, count=300))
    make = partial(_add_rms_norm, width=4096, count=300)
    yield Probe("add_rms_norm 4096", _TREE, 300, make)
    yield Probe("silu_mul 14336", _EACH, 300, partial(_silu_mul, width=14336, count=300))
    yield Probe("rope 8x128", _EACH, 300, partial(_rope, heads=8, dim=128, count=300))
    for heads, dtype in (((32, 8, 128), BF), ((9, 3, 64), BF), ((9, 3, 64), F32)):
        name = f"attention {str(dtype)[6:]} {heads[0]}/{heads[1]}x{heads[2]}"
        order = _pieces(heads[2], dtype)
        yield Probe(name, order, 1100, partial(_attention, heads=heads, dtype=dtype, count=1100))
    order = "a maximum, lowest id first; Philox4x32-10 and logarithms in float64"
    yield Probe("gumbel_argmax 50000", order, 64, partial(_gumbel, vocab=50000, count=64))


def golden(capability: tuple[int, int]) -> dict[str, str]:
    """Probe → fingerprint as recorded on such a GPU; empty if none was at hand."""
    text = resources.files(__package__).joinpath(GOLDEN).read_text("utf-8")
    found: dict[str, str] = json.loads(text).get("fingerprints", {}).get(_key(capability), {})
    return found


def _key(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def moved(device: torch.device, known: dict[str, str]) -> list[str]:
    """Probes whose bits are not the recorded ones, and those that nobody recorded."""
    return [p.name for p in probes() if p.fingerprint(device) != known.get(p.name)]


def unequal(probe: Probe, device: torch.device) -> list[str]:
    """Row counts and places whose rows have other bits than in the company of all."""
    run = probe.make(device)
    whole, wrong = run(0, probe.rows), []
    for count in (c for c in COUNTS if c <= probe.rows):
        for begin in sorted({0, (probe.rows - count) // 3, probe.rows - count}):
            part = run(begin, begin + count)
            if not all(same(p, w[begin : begin + count]) for p, w in zip(part, whole, strict=True)):
                wrong.append(f"rows {begin}…{begin + count - 1}")
    return wrong


def same(one: Tensor, two: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def record(device: torch.device) -> dict[str, object]:
    """What ``golden_bits.json`` holds, from the GPU at hand."""
    import triton

    capability = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fingerprints": {_key(capability): {p.name: p.fingerprint(device) for p in probes()}},
    }
