"""Packed weights: the layout that the linear kernels stream.

A weight [N, K] is cut into panels of 16 rows; a panel is stored [K][16], the last one padded with
zeros. One step of the product then reads 16 (or 32, 64) outputs' weights from one cache line per
panel, and every byte of the buffer is read once and in order.

int8: symmetric, one fp16 scale for 32 values along K (the layout of values that GGUF calls Q8_0, so
such a file loads without loss). A group scale is about as accurate as eight bits get and costs 1/16
of the bytes. A panel is stored [K/4][16][4]: four neighbours along K are one step of an integer dot
product, for which the rows of x are rounded to int8 in the same groups (``ops.linear``).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from deepinfer.native import _kernels

PANEL = 16
GROUP = 32
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_SLAB = 64 << 20
_HUGE = 2 << 20
_LINE = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [n, k] in panels: ``data`` [⌈n/16⌉, k', 16], k' = k (int8: rounded up to 32, stored
    as [⌈n/16⌉, k'/4, 16, 4]).

    dtype is float32, bfloat16 or int8; ``scales`` float16 [⌈n/16⌉, k'/32, 16] for int8, else None.
    """

    n: int
    k: int
    dtype: torch.dtype
    data: Tensor
    scales: Tensor | None
    code: int
    pointer: int
    scale_pointer: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


class WeightMemory:
    """Where an engine's packed weights lie, side by side, on huge pages if the system grants them.

    A step of few rows reads every weight once, as fast as memory gives them; with small pages a
    fifth of that time goes into looking addresses up.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of that shape, not written yet; it lives as long as the tensor."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > len(self._rest):
            self._rest = _slab(max(nbytes, _SLAB))
        piece = self._rest[:nbytes]
        self._rest = self._rest[-(-nbytes // _LINE) * _LINE :]
        return piece.view(dtype).view(shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _slab(nbytes: int) -> Tensor:
    """uint8[nbytes] from a huge page's boundary on; memory is taken as it is first written."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE :][:nbytes]


def prepare_linear(
    w: Tensor | Sequence[Tensor],
    quantization: str | None = None,
    *,
    memory: WeightMemory | None = None,
    num_threads: int | None = None,
) -> PackedWeight:
    """Pack w [N, K] float32 or bfloat16, or a list of such blocks stacked along N (q, k, v).

    ``quantization`` is None (keep the dtype) or "int8". In a list every block but the last needs
    a multiple of 16 rows, or the blocks are concatenated first. The source is only read; to hold
    a weight once, free it afterwards. Raises TypeError or ValueError for anything else.
    """
    blocks = [w] if isinstance(w, Tensor) else list(w)
    _check_blocks(blocks, quantization)
    if any(block.shape[0] % PANEL for block in blocks[:-1]):
        blocks = [torch.cat(blocks)]
    n, k = sum(block.shape[0] for block in blocks), blocks[0].shape[1]
    dtype = torch.int8 if quantization else blocks[0].dtype
    panels = -(-n // PANEL)
    deep = -(-k // GROUP) * GROUP if quantization else k
    empty = _empty if memory is None else memory.empty
    data = empty((panels, deep, PANEL), dtype)
    scales = None
    if quantization:
        scales = empty((panels, deep // GROUP, PANEL), torch.float16)
    code, pointer = DTYPES[dtype], data.data_ptr()
    scale_pointer = scales.data_ptr() if scales is not None else 0
    threads = num_threads or torch.get_num_threads()
    row = 0
    for block in blocks:
        _kernels.pack(
            block.data_ptr(), DTYPES[block.dtype], block.stride(0), block.shape[0], k, row,
            pointer, code, scale_pointer, threads,
        )  # fmt: skip
        row += block.shape[0]
    return PackedWeight(n, k, dtype, data, scales, code, pointer, scale_pointer)


def _check_blocks(blocks: list[Tensor], quantization: str | None) -> None:
    if quantization not in (None, "int8"):
        raise ValueError(f"quantization must be None or 'int8', not {quantization!r}")
    if not blocks:
        raise ValueError("no weight was given")
    first = blocks[0]
    for block in blocks:
        if block.dtype not in (torch.float32, torch.bfloat16) or block.dtype != first.dtype:
            raise TypeError("a weight must be float32 or bfloat16, one dtype for all blocks")
        if block.dim() != 2 or block.shape[1] != first.shape[1] or block.shape[1] == 0:
            raise ValueError("a weight must be [N, K] with K > 0, one K for all blocks")
        if block.stride(1) != 1 or block.device.type != "cpu":
            raise ValueError("a weight must be on the CPU, contiguous along K")


def unpack(w: PackedWeight) -> Tensor:
    """The weight [n, k] as float32; for int8 the dequantised values. Slow; for tests."""
    data = w.data.float()
    if w.scales is not None:
        data = data.view(len(data), -1, PANEL, 4).transpose(2, 3).reshape(data.shape)
        data = data * w.scales.float().repeat_interleave(GROUP, dim=1)
    return data.transpose(1, 2).reshape(-1, data.shape[1])[: w.n, : w.k].contiguous()


def quantize_int8_reference(w: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of "int8": w [N, K] -> (q int8 [N, K], scale float16 [N, ⌈K/32⌉]).

    ``scale = fp16(max|w| / 127)`` of 32 neighbours along K (at most 65504; rounded up where fp16 is
    subnormal), ``q = round(w / scale)`` half to even within ±127, and 0 where scale is 0.
    """
    n, k = w.shape
    groups = -(-k // GROUP)
    wide = torch.zeros((n, groups * GROUP), dtype=torch.float32)
    wide[:, :k] = w.float()
    wide = wide.view(n, groups, GROUP)
    ideal = (wide.abs().amax(-1) / 127).clamp(max=65504)
    scale = torch.where(ideal < 2.0**-14, (ideal * 2.0**24).ceil() * 2.0**-24, ideal).half()
    step = scale.float()[..., None]
    q = torch.where(step > 0, wide / torch.where(step > 0, step, 1), 0).clamp(-127, 127).round()
    return q.to(torch.int8).view(n, -1)[:, :k].contiguous(), scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q · scale, float32 [N, K]; exact."""
    return q.float() * scale.float().repeat_interleave(GROUP, dim=1)[:, : q.shape[1]]
