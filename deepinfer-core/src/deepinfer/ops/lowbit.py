"""Low-bit formats: what the bytes of FP8 and FP4 checkpoints and caches mean.

FP8 is E4M3 (no infinity, 448 at most), FP4 is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives), E8M0 is one exponent byte: 2^(byte − 127), 255 is NaN (OCP microscaling formats 1.0).
All three decode exactly into float32, and products of a value and its scale into bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

TILE: Final = 32
FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """A weight [..., N, K] as its checkpoint stores it.

    ``fp8``: ``codes`` uint8[..., N, K] E4M3 bytes, ``scales`` uint8[..., ⌈N/32⌉, ⌈K/32⌉], one E8M0
    byte for each 32×32 tile. ``fp4``: ``codes`` uint8[..., N, K/2], the even element in the low
    nibble, ``scales`` uint8[..., N, K/32].
    """

    codes: Tensor
    scales: Tensor
    kind: Literal["fp8", "fp4"]

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        *lead, last = self.codes.shape
        return torch.Size((*lead, last * 2 if self.kind == "fp4" else last))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.codes)

    def to(self, device: torch.device | None) -> BlockScaled:
        """The same bytes on a device; None leaves them where they are."""
        return BlockScaled(self.codes.to(device), self.scales.to(device), self.kind)

    def __getitem__(self, index: int) -> BlockScaled:
        """One expert of a stack."""
        return BlockScaled(self.codes[index], self.scales[index], self.kind)

    def rows(self, begin: int, end: int) -> BlockScaled:
        """Output rows ``begin … end−1`` of a weight [N, K]; ``begin`` a multiple of 32."""
        assert begin % TILE == 0
        tiles = slice(begin // TILE, -(-end // TILE)) if self.kind == "fp8" else slice(begin, end)
        return BlockScaled(self.codes[begin:end], self.scales[tiles], self.kind)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values; exact in float32 and bfloat16."""
        scale = e8m0(self.scales).repeat_interleave(TILE, -1)
        if self.kind == "fp8":
            scale = scale.repeat_interleave(TILE, -2)[..., : self.shape[-2], : self.shape[-1]]
            return (e4m3(self.codes) * scale).to(dtype)
        return (unpack_fp4(self.codes) * scale).to(dtype)


def e8m0(codes: Tensor) -> Tensor:
    """uint8 exponents to float32; byte 0 is 2^−127, a subnormal."""
    return codes.view(torch.float8_e8m0fnu).float()


def e4m3(codes: Tensor) -> Tensor:
    """uint8 codes to float32."""
    return _look_up(_E4M3, codes)


def unpack_fp4(codes: Tensor) -> Tensor:
    """uint8[..., n] to float32[..., 2n], low nibble first."""
    return _look_up(_FP4_PAIRS, codes).view(torch.float32)


def pack_fp4(values: Tensor) -> Tensor:
    """E2M1 values float32[..., 2n] to codes uint8[..., n]; code 0 for what is none."""
    top = (values.view(torch.int32) >> 22) & 0x3FF  # sign, exponent, first bit of the mantissa
    codes = _FP4_CODES.to(values.device).index_select(0, top.flatten()).view(values.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """An element of the table for each byte: several times as fast as torch's conversions."""
    table = table.to(codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _fp4_tables() -> tuple[Tensor, Tensor]:
    """Both values of each byte side by side in 64 bits, and codes by the top ten bits of values."""
    values = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)], dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), 1).view(torch.int64).flatten()
    codes = torch.zeros(1024, dtype=torch.uint8)
    codes[(values.view(torch.int32) >> 22) & 0x3FF] = torch.arange(16).to(torch.uint8)
    return pairs, codes


_E4M3: Final = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
_FP4_PAIRS, _FP4_CODES = _fp4_tables()
