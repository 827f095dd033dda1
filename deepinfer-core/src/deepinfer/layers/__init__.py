"""Building blocks of models: parameters, the ops that read them, the groups they talk to.

A layer holds prepared parameters as plain attributes (None until loaded) and calls ops. It knows
neither the device nor the backend.
"""

from deepinfer.layers.attention import Attention, AttentionShape
from deepinfer.layers.basic import Linear, RMSNorm, assign
from deepinfer.layers.mlp import MLP
from deepinfer.layers.moe import MoE, MoEShape
from deepinfer.layers.rotary import RopeConfig, rotary_table

__all__ = [
    "MLP",
    "Attention",
    "AttentionShape",
    "Linear",
    "MoE",
    "MoEShape",
    "RMSNorm",
    "RopeConfig",
    "assign",
    "rotary_table",
]
