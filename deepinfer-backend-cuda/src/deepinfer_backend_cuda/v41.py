"""What the backend provides of the ops that DeepSeek-V4.1 brought, and of those of experts."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.api import Impl

from deepinfer_backend_cuda import dispatch, hyper, index, latent, moe, scaled, sparse

OPS: Mapping[str, Impl] = {
    "quantize": Impl(scaled.quantize),
    "pack_rows": Impl(scaled.pack_rows),
    "unpack_rows": Impl(scaled.unpack_rows),
    "scaled_linear": Impl(scaled.scaled_linear, scaled.keep),
    "grouped_scaled_linear": Impl(moe.grouped_scaled_linear, scaled.keep),
    "scaled_moe": Impl(moe.scaled_moe, scaled.keep),
    "scaled_moe_block": Impl(moe.scaled_moe_block, scaled.keep),
    "route": Impl(moe.route),
    "permute": Impl(dispatch.permute),
    "grouped_linear": Impl(moe.grouped_linear),
    "hyper_mix": Impl(hyper.hyper_mix, hyper.prepare),
    "hyper_open": Impl(hyper.hyper_open, hyper.prepare),
    "hyper_collapse": Impl(hyper.hyper_collapse),
    "hyper_merge": Impl(hyper.hyper_merge),
    "engram_gate": Impl(hyper.engram_gate),
    "engram_block": Impl(hyper.engram_block, scaled.keep),
    "latent_write": Impl(latent.latent_write),
    "compress": Impl(latent.compress),
    "select_sparse": Impl(index.select_sparse),
    "latent_attention": Impl(sparse.latent_attention),
    "latent_attention_block": Impl(latent.latent_attention_block, latent.prepare),
}
