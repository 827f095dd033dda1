"""EAGLE-3: one decoder layer drafts token by token from hidden states. arXiv 2503.01840.

``config`` and ``weights`` read a checkpoint, ``head`` runs the layer, ``drafter`` ties it to the
engine. ``save`` makes tiny random checkpoints.
"""
