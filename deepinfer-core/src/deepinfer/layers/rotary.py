"""Rotary positions: from a checkpoint's fields to one table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.errors import ModelLoadError, UnsupportedError, shown

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles. ``dim``: rotated elements of a head; ``original``: the length
    that the model was trained with before it was stretched.
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    @classmethod
    def read(cls, raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
        """From config.json: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

        Raises:
            UnsupportedError: the kind of scaling is not built.
            ModelLoadError: a field is missing, or is not what its name says.
        """
        given: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            part = raw.get(name) or {}
            if not isinstance(part, Mapping):
                raise ModelLoadError(
                    f"The model's config.json has {name}={shown(part)}; an object is needed.",
                    setting=name,
                )
            given |= part
        try:
            return cls._of(given, raw, head_dim)
        except (TypeError, ValueError, OverflowError) as why:
            if isinstance(why, UnsupportedError):
                raise
            raise ModelLoadError(
                f"The model's rotary fields cannot be read: {why}.", setting="rope_parameters"
            ) from why

    @classmethod
    def _of(cls, given: Mapping[str, Any], raw: Mapping[str, Any], head_dim: int) -> RopeConfig:
        kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(kind, str) or kind not in _NEEDED:
            raise UnsupportedError(
                f"The model's rope scaling {kind!r} is not built.",
                setting="rope_scaling",
                next_step=f"Known: {', '.join(_NEEDED)}.",
            )
        missing = [name for name in _NEEDED[kind] if given.get(name) is None]
        if missing:
            raise ModelLoadError(
                f"The model's rope scaling {kind!r} lacks {', '.join(missing)}.",
                setting="rope_scaling",
            )
        share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
        known = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        return cls(
            dim=int(head_dim * share),
            theta=_theta(given.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            kind=kind,
            original=int(
                given.get("original_max_position_embeddings")
                or raw.get("original_max_position_embeddings")
                or raw.get("max_position_embeddings")
                or 0
            ),
            truncate=bool(given.get("truncate", True)),
            amplitude=_yarn_amplitude(given) if kind == "yarn" else 1.0,
            **{name: float(given[name]) for name in known if given.get(name) is not None},
        )


def _theta(value: Any) -> float:
    theta = float(value)
    if not 0 < theta < math.inf:
        raise ValueError(f"rope_theta={shown(value)} is no number above 0")
    return theta


def rotary_table(rope: RopeConfig, length: int, device: torch.device | None = None) -> Tensor:
    """float32[length, dim]: dim/2 cosines, then dim/2 sines of every position.

    Angles are computed in float64 and rounded once, so position 100,000 is as good as position 1.
    """
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angles = positions[:, None] * _frequencies(rope)
    table = torch.cat((angles.cos(), angles.sin()), -1) * rope.amplitude
    return table.float().to(device)


def _frequencies(rope: RopeConfig) -> Tensor:
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float64, device="cpu") / rope.dim
    plain = rope.theta**-exponent
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Short waves stay, long waves are stretched, those between are blended."""
    turns = rope.original * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Blend by the index of the pair, between those that turn beta_fast and beta_slow times."""

    def pair(turns: float) -> float:
        ratio = rope.original / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    index = torch.arange(rope.dim // 2, dtype=torch.float64, device="cpu")
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * plain / rope.factor + (1 - stretch) * plain


def _yarn_amplitude(given: Mapping[str, Any]) -> float:
    """The factor on cosines and sines, which grows with the stretch."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def size(weight: float) -> float:
        factor = float(given["factor"])
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return size(given["mscale"]) / size(given["mscale_all_dim"])
    return size(1.0)
