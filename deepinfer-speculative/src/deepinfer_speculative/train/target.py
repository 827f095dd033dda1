"""The frozen target in plain torch: hidden states of whole texts. Llama- and Qwen3-shaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from deepinfer.errors import UnsupportedError
from deepinfer.layers import rotary_table
from deepinfer.models.llama import LlamaAdapter, LlamaConfig
from deepinfer.models.qwen3 import Qwen3Adapter
from deepinfer.models.registry import adapter_for, architectures_of, model_config
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.models.checkpoint import Checkpoint


def dense_config(checkpoint: Checkpoint) -> LlamaConfig:
    """The config of a target that drafts are trained for.

    Raises:
        UnsupportedError: it is of another shape.
    """
    adapter = adapter_for(architectures_of(checkpoint.config)[0])
    if type(adapter) not in (LlamaAdapter, Qwen3Adapter):
        raise UnsupportedError(
            f"Drafts are trained for Llama- and Qwen3-shaped targets, not {adapter.name}."
            if hasattr(adapter, "name") else "Drafts are trained for dense targets.",
            setting="target",
        )  # fmt: skip
    c: LlamaConfig = model_config(adapter, checkpoint)
    if c.qkv_bias or c.o_bias or c.mlp_bias or any(w is not None for w in c.windows):
        raise UnsupportedError(
            "Drafts are trained for targets without biases and sliding windows.",
            setting="target",
        )
    return c


class Target:
    """Weights of a dense target and its forward pass over whole texts, without gradients.

    Attributes:
        config: the family's.
        embed, head: [V, H].
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config = dense_config(checkpoint)

        def get(name: str) -> Tensor:
            return checkpoint.tensor(name, dtype).to(device)

        self.embed = get("model.embed_tokens.weight")
        self.head = self.embed if self.config.tied else get("lm_head.weight")
        self.norm = get("model.norm.weight")
        names = ["input_layernorm", "post_attention_layernorm"]
        names += [f"self_attn.{n}_proj" for n in "qkvo"]
        names += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
        if self.config.qk_norm:
            names += ["self_attn.q_norm", "self_attn.k_norm"]
        self.layers: list[dict[str, Tensor]] = [
            {name.rpartition(".")[2]: get(f"model.layers.{i}.{name}.weight") for name in names}
            for i in range(self.config.layers)
        ]
        self.cos_sin = rotary_table(self.config.rope, self.config.max_position_embeddings, device)

    @torch.no_grad()
    def states(self, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """ids int64[B, S], padded behind -> (hidden rows [B, S, m·H] of the tapped layers side by
        side, rows [B, S, H] behind the final norm, which the head reads).
        """
        x = self.embed[ids]
        kept = {-1: x} if -1 in taps else {}
        cos, sin = self.cos_sin[: ids.shape[1]].chunk(2, -1)
        for index, layer in enumerate(self.layers):
            x = x + self._attention(rms_norm(x, layer["input_layernorm"], self.config.eps), layer,
                                    (cos, sin))  # fmt: skip
            y = rms_norm(x, layer["post_attention_layernorm"], self.config.eps)
            gate, up = F.linear(y, layer["gate_proj"]), F.linear(y, layer["up_proj"])
            x = x + F.linear(F.silu(gate) * up, layer["down_proj"])
            if index in taps:
                kept[index] = x
        joined = torch.cat([kept[tap] for tap in taps], -1)
        return joined, rms_norm(x, self.norm, self.config.eps)

    def _attention(self, x: Tensor, layer: dict[str, Tensor], turn: tuple[Any, Any]) -> Tensor:
        c = self.config
        q, k, v = (
            F.linear(x, layer[f"{n}_proj"]).view(*x.shape[:-1], -1, c.head_dim)
            for n in ("q", "k", "v")
        )
        if c.qk_norm:
            q, k = rms_norm(q, layer["q_norm"], c.eps), rms_norm(k, layer["k_norm"], c.eps)
        q, k = rotate(q, *turn), rotate(k, *turn)
        groups = c.heads // c.kv_heads
        k, v = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return F.linear(o.transpose(1, 2).flatten(2), layer["o_proj"])


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in float32."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (y * w.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., S, N, D], cos and sin [..., S, D/2] -> the same, turned by halves."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
