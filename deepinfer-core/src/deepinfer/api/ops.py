"""The names of the op table: one list, merged from house 7.1 and the CUDA design 5.3.

Semantics, shapes, dtypes and ties stand with each reference in ``deepinfer.ops.reference``. A
backend may override any name here; a new op always comes with a reference, so an old backend
keeps working. ``tests/house`` checks that this list is the table.
"""

from __future__ import annotations

from typing import Final

DENSE: Final = (
    "embedding",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "gated_mlp",
    "rope",
)
ATTENTION: Final = ("plan_attention", "kv_write", "attention")
BLOCKS: Final = ("attention_block", "mlp_block", "decoder_layers")
EXPERTS: Final = ("route", "permute", "grouped_linear", "moe")
SCALED: Final = (
    "quantize",
    "pack_rows",
    "unpack_rows",
    "scaled_linear",
    "grouped_scaled_linear",
    "scaled_moe",
    "scaled_moe_block",
)
HYPER: Final = ("hyper_mix", "hyper_collapse", "hyper_merge", "hyper_open")
LATENT: Final = (
    "latent_write",
    "compress",
    "select_sparse",
    "latent_attention",
    "latent_attention_block",
)
ENGRAM: Final = ("engram_rows", "engram_gate", "engram_block")
VISION: Final = ("full_attention",)
BATCH: Final = ("expand_rows", "append_rows")
SAMPLING: Final = (
    "logit_bias",
    "penalties",
    "apply_bitmask",
    "filter_top",
    "gumbel_argmax",
    "logprobs",
    "accept_prefix",
)
OP_NAMES: Final = (
    DENSE
    + ATTENTION
    + BLOCKS
    + EXPERTS
    + SCALED
    + HYPER
    + LATENT
    + ENGRAM
    + VISION
    + BATCH
    + SAMPLING
)
