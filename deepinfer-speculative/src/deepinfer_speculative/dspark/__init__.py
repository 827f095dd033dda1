"""DSpark: a block of drafts in one pass over the target's own hidden states. arXiv 2607.05147.

``config`` and ``weights`` read a checkpoint, ``backbone`` runs the block, ``heads`` make drafts and
confidences of it, ``drafter`` ties them to the engine. ``write`` makes tiny random checkpoints.
"""
