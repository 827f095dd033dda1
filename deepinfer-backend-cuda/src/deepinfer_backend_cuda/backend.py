"""The backend: what it claims, the device it opens, the ops it provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from deepinfer.api import BackendFacts, Impl, OpContext
from deepinfer.api.ops import OP_NAMES
from deepinfer.errors import UnsupportedError
from deepinfer.ops import invariant

from deepinfer_backend_cuda import attention, fp8, layers, linear, rows, sampling, v41
from deepinfer_backend_cuda.device import CudaDevice
from deepinfer_backend_cuda.kernel_cache import KernelCache, folder, of_others

MAX_HEAD_DIM = 256
"""Wider heads do not fit a tile; such an engine's attention runs the reference."""


class CudaBackend:
    """NVIDIA GPUs by way of Triton kernels, and of torch for what has none."""

    name = "cuda"
    device_type = "cuda"
    comm = "nccl"

    def __init__(self) -> None:
        self._device: CudaDevice | None = None

    def facts(self) -> BackendFacts:
        """Every op is batch-invariant: the kernels by their reduction order, the others because
        they are row-exact references (``deepinfer.ops.invariant.ROW_EXACT``) on this device too.
        """
        properties = torch.cuda.get_device_properties(0)
        return BackendFacts(
            dtypes=frozenset({"float32", "bfloat16"}),
            memory_bytes=properties.total_memory,
            page_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
            invariant=frozenset(OP_NAMES),
            graphs=True,
            step_tokens=8192,
            dequantize=False,
            quantizations=frozenset({"fp8"}),
            notes={
                "device": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "triton": triton.__version__,
            },
        )

    def open(self, local_rank: int) -> CudaDevice:
        """GPU ``local_rank``."""
        self._device = CudaDevice(local_rank)
        return self._device

    def provide(self, ctx: OpContext) -> Mapping[str, Impl]:
        """One set, whether invariance is asked for or not."""
        if ctx.quantization is not None and ctx.dtype is not torch.bfloat16:
            raise UnsupportedError(
                f"quantization={ctx.quantization!r} multiplies rows of bfloat16 on this device.",
                setting="dtype",
                next_step="Set dtype='bfloat16', or leave quantization out.",
            )
        self._keep_kernels(ctx)
        provided = {name: Impl(fn) for name, fn in _OPS.items()} | dict(v41.OPS)
        if ctx.head_dim is None or ctx.head_dim <= MAX_HEAD_DIM:
            provided |= {name: Impl(fn) for name, fn in _ATTENTION.items()}
            block = layers.attention_block if ctx.quantization is None else fp8.attention_block
            provided["attention_block"] = Impl(block, of_parts=True)
            run = layers.Layers(ctx.device, blocks=None if ctx.quantization is None else fp8.BLOCKS)
            provided["decoder_layers"] = Impl(run, of_parts=True)
            if self._device is not None:
                self._device.releases.append(run.release)
        elif ctx.invariant:
            provided["attention"] = Impl(invariant.attention)
        if ctx.quantization is not None:
            provided |= fp8.OPS
        return provided

    def _keep_kernels(self, ctx: OpContext) -> None:
        """On disk, in a folder of this kind of GPU; where the user said so, if he told Triton."""
        if ctx.cache_dir is None or ctx.device.type != "cuda" or of_others():
            return
        kernels = KernelCache(folder(ctx.cache_dir, torch.cuda.get_device_name(ctx.device)))
        kernels.serve()
        if self._device is not None:
            self._device.kernels = kernels


_OPS: Mapping[str, Callable[..., Any]] = {
    "linear": linear.linear,
    "rms_norm": rows.rms_norm,
    "add_rms_norm": rows.add_rms_norm,
    "silu_mul": rows.silu_mul,
    "rope": rows.rope,
    "kv_write": rows.kv_write,
    "append_rows": rows.append_rows,
    "mlp_block": layers.mlp_block,
    "apply_bitmask": sampling.apply_bitmask,
    "filter_top": sampling.filter_top,
    "gumbel_argmax": sampling.gumbel_argmax,
    "logprobs": sampling.logprobs,
}
_ATTENTION: Mapping[str, Callable[..., Any]] = {
    "plan_attention": attention.plan_attention,
    "attention": attention.attention,
}
