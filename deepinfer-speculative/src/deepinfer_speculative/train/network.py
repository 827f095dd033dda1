"""The draft in plain torch, for training: many anchors of a text at once. Spec 1.1 to 1.3.

Written apart from ``dspark.backbone``, from the same specification: tests hold one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from deepinfer.layers import rotary_table
from deepinfer.models.checkpoint import Checkpoint
from torch import Tensor, nn

from deepinfer_speculative.dspark.config import read_config
from deepinfer_speculative.dspark.save import shapes_of
from deepinfer_speculative.train.target import rms_norm, rotate


class Network(nn.Module):
    """Trainable weights under their checkpoint names; embedding and head are the target's.

    Args:
        raw: the draft's config.json.
        embed: float[V, H], the target's.
        norm: [H]: the target's final norm, from which the draft's own starts.
        seed: of the initial weights.
    """

    def __init__(self, raw: Mapping[str, Any], embed: Tensor, norm: Tensor, seed: int = 0) -> None:
        super().__init__()
        self.config, self.raw = read_config(raw), dict(raw)
        self.embed = embed
        source = torch.Generator().manual_seed(seed)
        depth = (2 * self.config.shape.layers) ** -0.5
        self.table = nn.ParameterDict()
        for name, shape in shapes_of(raw).items():
            value = torch.empty(shape)
            if "norm" in name:
                value.fill_(1.0)
            elif "confidence" in name or "markov_w2" in name:
                value.zero_()  # no correction, confidence one half
            else:
                spread = 0.02 * (
                    depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                )
                value.normal_(0.0, spread, generator=source)
            self.table[_key(name)] = nn.Parameter(value)
        with torch.no_grad():
            self.table[_key("norm.weight")].copy_(norm.float())
        self.to(embed.device)
        self.cos_sin = rotary_table(
            self.config.shape.rope,
            self.config.shape.max_position_embeddings + self.config.block,
            embed.device,
        )

    @torch.no_grad()
    def start_from(self, target: Checkpoint) -> None:
        """Begin with the target's last layers, and with context rows that are its last tap's."""
        own = [name for name in shapes_of(self.raw) if name.startswith("layers.")]
        offset = int(target.config["num_hidden_layers"]) - self.config.shape.layers
        for name in own:
            _, index, rest = name.split(".", 2)
            found = target.tensor(f"model.layers.{int(index) + offset}.{rest}", torch.float32)
            self.get(name).copy_(found)
        first = target.tensor(f"model.layers.{offset}.input_layernorm.weight", torch.float32)
        self.get("hidden_norm.weight").copy_(first)
        fc = self.get("fc.weight")
        fc.zero_()
        fc[:, -len(fc) :].fill_diagonal_(1.0)

    def get(self, name: str) -> Tensor:
        """A weight by its checkpoint name."""
        found: Tensor = self.table[_key(name)]
        return found

    def tensors(self) -> dict[str, Tensor]:
        """All weights by their checkpoint names, in float32."""
        return {name: self.get(name).detach() for name in shapes_of(self.raw)}

    def forward(self, joined: Tensor, lengths: Tensor, anchors: Tensor, ids: Tensor) -> Tensor:
        """Block rows behind the final norm, [B, A, γ, H].

        joined [B, S, m·H]: target states; lengths int64[B]; anchors int64[B, A]: positions, of
        texts; ids int64[B, A]: the anchors' ids.
        """
        c, block = self.config, self.config.block
        context = self._norm(F.linear(joined, self._w("fc.weight", joined)), "hidden_norm.weight")
        tokens = ids[..., None].repeat(1, 1, block)
        tokens[..., 1:] = c.mask_token
        x = self.embed[tokens].flatten(1, 2).to(joined.dtype)  # [B, A·γ, H]
        place = anchors[..., None] + torch.arange(block, device=ids.device)
        mask = self._mask(joined.shape[1], anchors)
        far = self.cos_sin[: joined.shape[1]].chunk(2, -1)
        near = self.cos_sin[place.flatten(1)].chunk(2, -1)
        for index in range(c.shape.layers):
            at = f"layers.{index}"
            y = self._norm(x, f"{at}.input_layernorm.weight")
            x = x + self._attention(at, context, y, (far, near), mask)
            y = self._norm(x, f"{at}.post_attention_layernorm.weight")
            gate = F.linear(y, self._w(f"{at}.mlp.gate_proj.weight", y))
            up = F.linear(y, self._w(f"{at}.mlp.up_proj.weight", y))
            x = x + F.linear(F.silu(gate) * up, self._w(f"{at}.mlp.down_proj.weight", y))
        out = self._norm(x, "norm.weight")
        return out.view(len(out), -1, block, out.shape[-1])

    def _attention(
        self, at: str, context: Tensor, x: Tensor, turns: tuple[Any, Any], mask: Tensor
    ) -> Tensor:
        shape = self.config.shape
        far, near = turns

        def rows(name: str, y: Tensor) -> Tensor:
            flat = F.linear(y, self._w(f"{at}.self_attn.{name}_proj.weight", y))
            return flat.view(*flat.shape[:-1], -1, shape.head_dim)

        def normed(name: str, y: Tensor) -> Tensor:
            return self._norm(y, f"{at}.self_attn.{name}_norm.weight") if shape.qk_norm else y

        q = rotate(normed("q", rows("q", x)), *near)
        keys = [rotate(normed("k", rows("k", y)), *t) for y, t in ((context, far), (x, near))]
        values = [rows("v", y) for y in (context, x)]
        groups = shape.heads // shape.kv_heads
        k, v = (
            torch.cat(t, 1).repeat_interleave(groups, 2).transpose(1, 2) for t in (keys, values)
        )
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        out = o.transpose(1, 2).flatten(2)
        return F.linear(out, self._w(f"{at}.self_attn.o_proj.weight", out))

    def _mask(self, length: int, anchors: Tensor) -> Tensor:
        """bool[B, 1, A·γ, S + A·γ]: context before the block's anchor, and the block itself."""
        block, count = self.config.block, anchors.shape[1]
        seen = torch.arange(length, device=anchors.device) < anchors[..., None]
        seen = seen.repeat_interleave(block, 1)
        mine = torch.arange(count, device=anchors.device).repeat_interleave(block)
        own = (mine[:, None] == mine)[None].expand(len(anchors), -1, -1)
        return torch.cat((seen, own), -1)[:, None]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.get(name), self.config.shape.eps)

    def _w(self, name: str, like: Tensor) -> Tensor:
        """A weight in the activations' type; the master stays float32."""
        return self.get(name).to(like.dtype)

    def markov(self, before: Tensor) -> Tensor:
        """W1 of the ids before, float32[..., r]."""
        return F.embedding(before, self.get("markov_head.markov_w1.weight"))

    def confidence(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Raw logits float32[...] of block rows [..., H] and embeddings [..., r]."""
        x = torch.cat((hidden.float(), embeddings.float()), -1)
        w, b = (self.get(f"confidence_head.proj.{n}") for n in ("weight", "bias"))
        return F.linear(x, w, b)[..., 0]


def _key(name: str) -> str:
    """Parameter names may not have dots."""
    return name.replace(".", "__")
