"""The references: plain torch, one definition for each op of the table."""

from deepinfer.ops.reference import (
    attention,
    batch,
    blocks,
    dense,
    engram,
    hyper,
    latent,
    moe,
    sample,
    scaled,
    sparse,
    vision,
)

__all__ = [
    "attention",
    "batch",
    "blocks",
    "dense",
    "engram",
    "hyper",
    "latent",
    "moe",
    "sample",
    "scaled",
    "sparse",
    "vision",
]
