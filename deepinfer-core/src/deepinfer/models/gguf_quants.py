"""Dequantising GGUF rows into a float32 buffer or a tensor of any dtype.

Where you are: called by ``checkpoint.GGUFCheckpoint`` once per tensor. The types that large files
consist of (``_FAST``) have a vectorised path here that writes straight into
the destination; all others go through ``gguf.quants``. Both give the same bits: the order
of the float32 operations is the format's, one multiplication and one addition, never fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.errors import ModelLoadError
from deepinfer.models.gguf import gguf_package

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Values per step: 512 KB of float32, so that the passes over a chunk stay in the cache.
_CHUNK: Final = 1 << 17


def dequantize_into(raw: Bytes, quant: str, out: torch.Tensor, where: str) -> None:
    """Fill ``out`` (``[rows, columns]``, contiguous) from ``raw`` (``[rows, bytes per row]``).

    ``out`` may have any floating dtype; values are rounded to nearest even from float32.
    """
    decode = _decoder(quant, where)
    rows, columns = out.shape
    step = max(_CHUNK // max(columns, 1), 1)
    direct = out.numpy() if out.dtype == torch.float32 else None
    buffer = np.empty((min(step, rows), columns), np.float32)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        chunk = buffer[: last - first] if direct is None else direct[first:last]
        with np.errstate(all="ignore"):  # a damaged scale is the model's NaN, not our warning
            decode(raw[first:last], chunk)
        if direct is None:
            out[first:last].copy_(torch.from_numpy(chunk))


def _decoder(quant: str, where: str) -> Callable[[Bytes, Floats], None]:
    fast = _FAST.get(quant)
    if fast is not None:
        return fast
    gguf = gguf_package()
    kind = gguf.GGMLQuantizationType[quant]

    def through_package(raw: Bytes, out: Floats) -> None:
        try:
            out[...] = gguf.quants.dequantize(np.ascontiguousarray(raw), kind)
        except NotImplementedError:
            raise _unsupported(quant, where) from None

    return through_package


def _unsupported(quant: str, where: str) -> ModelLoadError:
    return ModelLoadError(
        f"{where} is stored as {quant}, which cannot be dequantised; known are {', '.join(KNOWN)}.",
        setting="model",
        next_step="Use a file in one of these types.",
    )


def _f16(block: Bytes) -> Floats:
    return block.view(np.float16).astype(np.float32)


def _f32_rows(raw: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(raw).view(np.float32)


def _f16_rows(raw: Bytes, out: Floats) -> None:
    out[...] = np.ascontiguousarray(raw).view(np.float16)


def _bf16_rows(raw: Bytes, out: Floats) -> None:
    np.left_shift(np.ascontiguousarray(raw).view(np.uint16), np.uint32(16), out=out.view(np.uint32))


def _q8_0(raw: Bytes, out: Floats) -> None:
    blocks = raw.reshape(-1, 34)
    np.multiply(blocks[:, 2:].view(np.int8), _f16(blocks[:, :2]), out=out.reshape(-1, 32))


def _q4_0(raw: Bytes, out: Floats) -> None:
    blocks = raw.reshape(-1, 18)
    scale, packed, halves = _f16(blocks[:, :2]), blocks[:, 2:], out.reshape(-1, 2, 16)
    for half, nibbles in enumerate((packed & 15, packed >> 4)):
        np.multiply(nibbles.view(np.int8) - np.int8(8), scale, out=halves[:, half])


def _q4_1(raw: Bytes, out: Floats) -> None:
    blocks = raw.reshape(-1, 20)
    scale, low, packed = _f16(blocks[:, :2]), _f16(blocks[:, 2:4]), blocks[:, 4:]
    halves = out.reshape(-1, 2, 16)
    for half, nibbles in enumerate((packed & 15, packed >> 4)):
        np.multiply(nibbles, scale, out=halves[:, half])
    np.add(halves, low[:, :, None], out=halves)


def _high_bits(packed: Bytes) -> Bytes:
    """Four bytes hold the fifth bit of 32 values; as 0 or 16, in two halves."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits).reshape(-1, 2, 16)


def _q5_0(raw: Bytes, out: Floats) -> None:
    blocks = raw.reshape(-1, 22)
    scale, values, packed = _f16(blocks[:, :2]), _high_bits(blocks[:, 2:6]), blocks[:, 6:]
    values[:, 0] |= packed & 15
    values[:, 1] |= packed >> 4
    signed = values.view(np.int8).reshape(-1, 32)
    signed -= 16
    np.multiply(signed, scale, out=out.reshape(-1, 32))


def _q5_1(raw: Bytes, out: Floats) -> None:
    blocks = raw.reshape(-1, 24)
    scale, low = _f16(blocks[:, :2]), _f16(blocks[:, 2:4])
    values, packed, flat = _high_bits(blocks[:, 4:8]), blocks[:, 8:], out.reshape(-1, 32)
    values[:, 0] |= packed & 15
    values[:, 1] |= packed >> 4
    np.multiply(values.reshape(-1, 32), scale, out=flat)
    np.add(flat, low, out=flat)


def _q4_k(raw: Bytes, out: Floats) -> None:
    """Super-blocks of 256: eight groups of 32 with a 6-bit scale and a 6-bit minimum."""
    blocks = raw.reshape(-1, 144)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    _k_groups(blocks, (packed & 15, packed >> 4), out)


def _q5_k(raw: Bytes, out: Floats) -> None:
    """As Q4_K, and bit ``g`` of 32 further bytes is the fifth bit of group ``g``."""
    blocks = raw.reshape(-1, 176)
    packed, high = blocks[:, 48:].reshape(-1, 4, 32), blocks[:, 16:48]
    low, upper = packed & 15, packed >> 4
    for pair in range(4):
        low[:, pair] |= (high >> (2 * pair) & 1) << 4
        upper[:, pair] |= (high >> (2 * pair + 1) & 1) << 4
    _k_groups(blocks, (low, upper), out)


def _k_groups(blocks: Bytes, values: tuple[Any, Any], out: Floats) -> None:
    """Scale the even and the odd groups; both types keep their scales in the first 16 bytes."""
    scales, lows = _k_scales(blocks[:, 4:16])
    scale = (_f16(blocks[:, :2]) * scales).reshape(-1, 4, 2, 1)
    low = (_f16(blocks[:, 2:4]) * lows).reshape(-1, 4, 2, 1)
    groups = out.reshape(-1, 4, 2, 32)
    for odd in (0, 1):
        np.multiply(values[odd], scale[:, :, odd], out=groups[:, :, odd])
    np.subtract(groups, low, out=groups)


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Twelve bytes hold eight 6-bit scales and eight 6-bit minima."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    lows = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    return scales, lows


def _q6_k(raw: Bytes, out: Floats) -> None:
    """Super-blocks of 256: low nibbles, two high bits apart, sixteen int8 scales."""
    blocks = raw.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    scale = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    values = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=values[:, :, :2].reshape(-1, 2, 64))
    np.right_shift(low, 4, out=values[:, :, 2:].reshape(-1, 2, 64))
    for part in range(4):
        values[:, :, part] |= (high >> (2 * part) & 3) << 4
    signed = values.view(np.int8)
    signed -= 32
    np.multiply(signed.reshape(-1, 16, 16), scale[:, :, None], out=out.reshape(-1, 16, 16))


_FAST: Final[Mapping[str, Callable[[Bytes, Floats], None]]] = {
    "F32": _f32_rows,
    "F16": _f16_rows,
    "BF16": _bf16_rows,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

# What a file may consist of: the paths above and what gguf.quants dequantises.
KNOWN: Final[tuple[str, ...]] = (
    *_FAST,
    "Q2_K",
    "Q3_K",
    "IQ1_M",
    "IQ1_S",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "IQ3_S",
    "IQ3_XXS",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "TQ1_0",
    "TQ2_0",
)
