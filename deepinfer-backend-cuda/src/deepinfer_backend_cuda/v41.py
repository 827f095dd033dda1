"""What the backend provides of the ops that DeepSeek-V4.1 brought, and of those of experts."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.api import Impl

from deepinfer_backend_cuda import moe, scaled

OPS: Mapping[str, Impl] = {
    "quantize": Impl(scaled.quantize),
    "pack_rows": Impl(scaled.pack_rows),
    "unpack_rows": Impl(scaled.unpack_rows),
    "scaled_linear": Impl(scaled.scaled_linear, scaled.keep),
    "grouped_scaled_linear": Impl(moe.grouped_scaled_linear, scaled.keep),
    "scaled_moe": Impl(moe.scaled_moe, scaled.keep),
    "scaled_moe_block": Impl(moe.scaled_moe_block, scaled.keep),
    "route": Impl(moe.route),
    "permute": Impl(moe.permute),
    "grouped_linear": Impl(moe.grouped_linear),
}
