"""One decoder layer: parameters, and the four composites that they are handed to.

The streams [T, n, D] and the mix carried between sublayers travel together as :class:`Flow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepinfer.api.model import DeviceBatch, KVPools
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.ops.reference.engram import EngramParams
from deepinfer.ops.reference.hyper import HyperParams
from deepinfer.ops.reference.latent import (
    CompressorParams,
    IndexerParams,
    LatentCaches,
    LatentParams,
    LatentRows,
)
from deepinfer.ops.reference.scaled import ScaledMoEParams
from deepinfer.ops.reference.sparse import Picks
from deepinfer.ops.table import OpSet


@dataclass(frozen=True, slots=True)
class Flow:
    """What passes from layer to layer, a row for each token of ``batch``.

    ``x`` [T, n, D]: the streams; ``pre`` float32[T, n]: the mix that the next sublayer collapses
    them with; ``picks``: the entries that the last index source chose; ``image`` bool[T].
    """

    batch: DeviceBatch
    x: Tensor
    pre: Tensor
    picks: Picks | None
    image: Tensor


class Hyper:
    """What opens a sublayer: the mix of the streams and the norm of their sum."""

    def __init__(self, config: DeepseekV41Config) -> None:
        self._config = config
        self.fn: Any = None
        self.base: Any = None
        self.scale: Any = None
        self.norm: Any = None

    def params(self) -> HyperParams:
        how = self._config
        return HyperParams(
            fn=self.fn,
            scale=self.scale,
            base=self.base,
            iters=how.sinkhorn_iters,
            eps=how.sinkhorn_eps,
            norm=self.norm,
            norm_eps=how.eps,
        )


class Compressor:
    """A KV source's parameters."""

    def __init__(self) -> None:
        self.kv: Any = None
        self.norm: Any = None
        self.key: Any = None
        self.key_norm: Any = None


class Indexer:
    """An index source's parameters."""

    def __init__(self) -> None:
        self.q: Any = None
        self.weights: Any = None


class Attention:
    """A layer's parameters, and its place in the schedule."""

    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        self._config = config
        self._layer = layer
        self.q_kv: Any = None
        self.q_norm: Any = None
        self.kv_norm: Any = None
        self.q: Any = None
        self.out_a: Any = None
        self.out_b: Any = None
        self.sink: Any = None
        self.compressor = Compressor() if layer in config.kv_sources else None
        self.indexer = Indexer() if layer in config.index_sources else None

    def params(self) -> LatentParams:
        how, layer = self._config, self._layer
        compressor = indexer = None
        if (c := self.compressor) is not None:
            compressor = CompressorParams(c.kv, c.norm, c.key, c.key_norm)
        if (i := self.indexer) is not None:
            indexer = IndexerParams(
                q=i.q,
                weights=i.weights,
                heads=how.index_heads,
                k=how.index_topk,
                publish=how.publishes(layer),
                block_size=how.block_size(layer),
            )
        return LatentParams(
            q_kv=self.q_kv,
            q_norm=self.q_norm,
            kv_norm=self.kv_norm,
            q=self.q,
            out_a=self.out_a,
            out_b=self.out_b,
            sink=self.sink,
            heads=how.heads,
            groups=how.o_groups,
            eps=how.eps,
            window=how.window,
            ratio=how.ratios[layer],
            floored=layer > how.last_source,
            compressor=compressor,
            indexer=indexer,
        )

    def caches(self, kv: KVPools) -> LatentCaches:
        """The layer's own ring, and the entries of its KV source."""
        layer, window = self._layer, kv.tensor("window", self._layer)
        source, ratio = self._config.kv_source(layer), self._config.ratios[layer]
        if source is None:
            return LatentCaches(window)
        return LatentCaches(
            window=window,
            open=kv.tensor("open", layer) if source == layer and ratio == 2 else None,
            compressed=kv.tensor(f"compressed-r{ratio}", source),
            index_keys=kv.tensor(f"index-r{ratio}", source),
        )


class Experts:
    """A layer's router, routed experts and shared expert."""

    def __init__(self, config: DeepseekV41Config) -> None:
        self._config = config
        self.router: Any = None
        self.bias: Any = None
        self.image_bias: Any = None
        self.gate_up: Any = None
        self.down: Any = None
        self.shared_gate_up: Any = None
        self.shared_down: Any = None

    def params(self) -> ScaledMoEParams:
        how = self._config
        return ScaledMoEParams(
            router=self.router,
            bias=self.bias,
            image_bias=self.image_bias,
            gate_up=self.gate_up,
            down=self.down,
            shared_gate_up=self.shared_gate_up,
            shared_down=self.shared_down,
            experts=how.experts,
            chosen=how.chosen,
            scale=how.expert_scale,
            limit=how.expert_limit,
        )


class Engram:
    """A layer's table, whose rows stay on the host, and what makes of them keys and a value."""

    def __init__(self, config: DeepseekV41Config) -> None:
        self._eps = config.eps
        self.table: Any = None
        self.kv: Any = None
        self.q_weight: Any = None
        self.k_weight: Any = None

    def params(self) -> EngramParams:
        return EngramParams(self.kv, self.q_weight, self.k_weight, self._eps)


class Layer:
    """Attention and experts, each behind a mix and before a merge; Engram first where it is."""

    def __init__(self, config: DeepseekV41Config, layer: int, ops: OpSet) -> None:
        self.ops = ops
        shape = config.engram
        self.engram = Engram(config) if shape is not None and layer in shape.layers else None
        self.attn_hyper = Hyper(config)
        self.attn = Attention(config, layer)
        self.ffn_hyper = Hyper(config)
        self.moe = Experts(config)

    def recall(self, flow: Flow, rows: Tensor) -> Flow:
        """The streams with what the table says. rows int64[T, columns]."""
        assert self.engram is not None
        found = self.engram.table.gather(rows, flow.x.dtype)
        x = self.ops.engram_block(flow.x, found, ~flow.image, self.engram.params())
        return Flow(flow.batch, x, flow.pre, flow.picks, flow.image)

    def __call__(self, flow: Flow, kv: KVPools, cos_sin: Tensor, late: bool) -> Flow:
        """``late``: leave latents of all rows, and go on with the late ones alone."""
        ops, batch, picked = self.ops, flow.batch, None
        image, x = flow.image, flow.x
        rows, mix = ops.hyper_open(x, flow.pre, self.attn_hyper.params())
        if late:
            assert batch.late is not None
            batch, picked = batch.late, batch.late_rows
        y, picks = ops.latent_attention_block(
            rows,
            self.attn.params(),
            self.attn.caches(kv),
            LatentRows(flow.batch, batch, picked),
            cos_sin,
            flow.picks,
        )
        if picked is not None:
            image, x = image[picked], x[picked]
            mix = tuple(part[picked] for part in mix)
        if not len(x):
            return Flow(batch, x, mix[0], picks, image)
        x = ops.hyper_merge(x, y, *mix[1:])
        rows, after = ops.hyper_open(x, mix[0], self.ffn_hyper.params())
        y = ops.scaled_moe_block(rows, image, self.moe.params())
        return Flow(batch, ops.hyper_merge(x, y, *after[1:]), after[0], picks, image)
