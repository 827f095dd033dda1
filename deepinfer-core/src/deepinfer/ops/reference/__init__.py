"""The references: plain torch, one definition for each op of the table."""

from deepinfer.ops.reference import attention, batch, blocks, dense, moe, sample

__all__ = ["attention", "batch", "blocks", "dense", "moe", "sample"]
