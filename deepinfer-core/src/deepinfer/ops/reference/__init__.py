"""The references: plain torch, one definition for each op of the table."""

from deepinfer.ops.reference import (
    attention,
    batch,
    blocks,
    dense,
    engram,
    hyper,
    moe,
    sample,
    scaled,
)

__all__ = [
    "attention",
    "batch",
    "blocks",
    "dense",
    "engram",
    "hyper",
    "moe",
    "sample",
    "scaled",
]
