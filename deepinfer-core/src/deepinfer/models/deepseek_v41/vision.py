"""The vision tower and the aligner: an image's patches to the embeddings of its span.

Specification 7.3. One image at a time, so an image's embeddings depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.model import WeightRule
from deepinfer.layers import Linear, RMSNorm, assign
from deepinfer.models.deepseek_v41.images import IMAGE, ImagePlan, VisionConfig
from deepinfer.ops.table import OpSet

EPS = 1e-6


class Vision:
    """Tower, aligner, and the learned vectors that frame an image.

    Args:
        config: the tower's sizes.
        ops: what it is written in.
    """

    def __init__(self, config: VisionConfig, ops: OpSet) -> None:
        self.config = config
        self.ops = ops
        self.embed = Linear(ops)
        self.blocks = [Block(config, ops) for _ in range(config.layers)]
        self.norm = RMSNorm(ops, EPS)
        self.aligner = [Linear(ops), Linear(ops)]
        self.frame: Any = None  # [3, D]: start, newline, end

    def load(self, parameter: str, value: Any) -> None:
        assign(self, parameter, value)

    def span(self, patches: Tensor, plan: ImagePlan) -> Tensor:
        """An image's positions [tokens, D] in order: delimiters from ``frame``, tokens aligned.

        patches [rows · columns, 3, P, P] of the activation dtype.
        """
        types = torch.tensor(plan.types(), device=patches.device)
        framing = torch.zeros_like(types)
        framing[types > IMAGE] = types[types > IMAGE] - IMAGE  # newline 1, end 2
        rows: Tensor = self.frame[framing].to(patches.dtype)
        rows[types == IMAGE] = self.align(self.tower(patches, plan), plan)
        return rows

    def tower(self, patches: Tensor, plan: ImagePlan) -> Tensor:
        """[rows · columns, Dv], normed."""
        x = self.embed(patches.flatten(1))
        cos_sin = grid_angles(plan.patches, self.config).to(patches.device)
        for block in self.blocks:
            x = block(x, cos_sin)
        return self.norm(x)

    def align(self, x: Tensor, plan: ImagePlan) -> Tensor:
        """Squares of patches joined, [rows · columns of tokens, D]. Missing patches are zeros.

        A square's features run by channel, then row, then column.
        """
        (rows, columns), shrink = plan.grid, self.config.shrink
        below, right = (n * shrink - m for n, m in zip(plan.grid, plan.patches, strict=True))
        grid = torch.nn.functional.pad(x.view(*plan.patches, -1), (0, 0, 0, right, 0, below))
        squares = grid.view(rows, shrink, columns, shrink, -1).permute(0, 2, 4, 1, 3)
        first, second = self.aligner
        return second(gelu(first(squares.reshape(rows * columns, -1))))


class Block:
    """Attention over the whole image and a gated MLP, each behind a norm."""

    def __init__(self, config: VisionConfig, ops: OpSet) -> None:
        self.ops = ops
        self.heads = config.heads
        self.norm1, self.norm2 = RMSNorm(ops, EPS), RMSNorm(ops, EPS)
        self.qkv, self.out = Linear(ops), Linear(ops)
        self.gate_up, self.down = Linear(ops), Linear(ops)

    def __call__(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.norm1(x), cos_sin))
        return x + self.down(self.ops.silu_mul(self.gate_up(self.norm2(x))))

    def _attend(self, x: Tensor, cos_sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(1)
        places = torch.arange(len(x), device=x.device)
        q, k = (self.ops.rope(part, places, cos_sin) for part in (q, k))
        o: Tensor = self.ops.full_attention(q, k, v, q.shape[-1] ** -0.5)
        return o.flatten(1)


def grid_angles(patches: tuple[int, int], config: VisionConfig) -> Tensor:
    """Each patch's angles as ``rope`` wants them: float32[rows · columns, d], cosines then sines.

    The first half of a head's pairs turns with the row, the second with the column.
    """
    quarter = config.hidden_size // config.heads // 4
    powers = torch.arange(quarter, dtype=torch.float32) / (2 * quarter)
    inverse = 1.0 / config.theta ** (2 * powers)
    rows, columns = (torch.arange(n, dtype=torch.float32) for n in patches)
    by_row = torch.outer(rows, inverse)[:, None].expand(-1, len(columns), -1)
    by_column = torch.outer(columns, inverse)[None].expand(len(rows), -1, -1)
    angles = torch.cat((by_row, by_column), -1).flatten(0, 1)
    return torch.cat((angles.cos(), angles.sin()), -1)


def gelu(x: Tensor) -> Tensor:
    """``x · Φ(x)``, exact, in float32."""
    wide = x.float()
    return (wide * 0.5 * (1 + torch.erf(wide * 0.5**0.5))).to(x.dtype)


def vision_rules(config: VisionConfig, hidden_size: int) -> Iterator[WeightRule]:
    """Every parameter of :class:`Vision`. Specification 8.1."""
    wide, inner = config.hidden_size, config.inner
    yield from _linear("embed", "vision.patch_embed.proj", (wide, 3 * config.patch**2))
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"vision.blocks.{i}"
        yield _rule(f"{ours}.norm1.weight", f"{theirs}.norm1.weight", (wide,), "rms_norm")
        yield _rule(f"{ours}.norm2.weight", f"{theirs}.norm2.weight", (wide,), "rms_norm")
        yield from _linear(f"{ours}.qkv", f"{theirs}.attn.wqkv", (3 * wide, wide))
        yield from _linear(f"{ours}.out", f"{theirs}.attn.wo", (wide, wide))
        gate_up = (2 * inner, wide)
        yield _rule(f"{ours}.gate_up.weight", f"{theirs}.mlp.w1.weight", gate_up, "linear")
        yield _rule(f"{ours}.down.weight", f"{theirs}.mlp.w2.weight", (wide, inner), "linear")
    yield _rule("norm.weight", "vision.norm.weight", (wide,), "rms_norm")
    squares = config.shrink**2 * wide
    yield from _linear("aligner.0", "aligner.w1", (hidden_size, squares))
    yield from _linear("aligner.1", "aligner.w2", (hidden_size, hidden_size))
    names = ("image_start", "image_newline", "image_end")
    yield WeightRule(
        parameter="frame",
        sources=names,
        shapes=((hidden_size,),) * 3,
        uses=(),
        stack=True,
    )


def _linear(parameter: str, source: str, shape: tuple[int, int]) -> Iterator[WeightRule]:
    yield _rule(f"{parameter}.weight", f"{source}.weight", shape, "linear")
    yield _rule(f"{parameter}.bias", f"{source}.bias", shape[:1])


def _rule(parameter: str, source: str, shape: tuple[int, ...], *uses: str) -> WeightRule:
    return WeightRule(parameter=parameter, sources=(source,), shapes=(shape,), uses=uses)
