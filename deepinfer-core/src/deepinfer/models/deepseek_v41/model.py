"""DeepSeek-V4.1: embedding or image, Engram, layers, collapse, head.

A step's rows run all layers up to the last KV source. That one leaves what later text reads of
every row; where prompts are truncated compactly, its attention and all layers behind it run the
late rows alone (``DeviceBatch.late``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.api.model import DeviceBatch, KVPools, Taps
from deepinfer.errors import ModelLoadError
from deepinfer.layers import Linear, RMSNorm, assign
from deepinfer.models.deepseek_v41.config import DeepseekV41Config
from deepinfer.models.deepseek_v41.engram_hash import hash_constants, token_map
from deepinfer.models.deepseek_v41.images import patches_of, plan_sized
from deepinfer.models.deepseek_v41.layer import Flow, Layer
from deepinfer.models.deepseek_v41.rotary import frequencies, table
from deepinfer.models.deepseek_v41.vision import Vision
from deepinfer.ops.reference.engram import EngramHash
from deepinfer.ops.table import OpSet


class DeepseekV41Model:
    """The text model, and the tower where there is one. Rows of images are known by their id.

    Args:
        config: sizes; ``tokenizer`` is read here where a layer has Engram.
        ops: what it is written in.
    """

    def __init__(self, config: DeepseekV41Config, ops: OpSet) -> None:
        self.config = config
        self.ops = ops
        self.embed = Linear(ops)
        self.layers = [Layer(config, layer, ops) for layer in range(config.layers)]
        self.norm = RMSNorm(ops, config.eps)
        self.head = Linear(ops)
        self.vision = None if config.vision is None else Vision(config.vision, ops)
        context = ops.context
        self._activations = None if context is None else context.activation_dtype or context.dtype
        device = None if context is None else context.device
        self._hash = engram_hash(config, device)
        width, length = config.rotary, config.max_model_len
        plain = frequencies(width, config.theta)
        stretched = frequencies(width, config.compress_theta, config.yarn)
        self._plain = table(plain, length, device)
        self._yarn = table(stretched, length, device)

    def load(self, parameter: str, value: Any) -> None:
        assign(self, parameter, value)

    def forward(self, batch: DeviceBatch, kv: KVPools, taps: Taps | None = None) -> Tensor:
        """[T, D]; rows that late layers do not run are 0.

        ``taps`` get what a drafter reads: the mean of the streams *before* each of their layers,
        rows that do not reach it 0 too.
        """
        last = self.config.last_source
        flow, rows = self._begin(batch)
        for index, layer in enumerate(self.layers):
            if rows is not None and layer.engram is not None:
                flow = layer.recall(flow, rows[:, self._engram_index(index)])
            if taps is not None and index in taps.layers:
                mean = torch.full_like(flow.pre, 1 / self.config.streams)
                taps.put(index, self._spread(batch, flow, self.ops.hyper_collapse(flow.x, mean)))
            late = index == last and batch.late is not None
            cos_sin = self._yarn if self.config.ratios[index] else self._plain
            flow = layer(flow, kv, cos_sin, late)
            if not len(flow.x):
                nothing = flow.x.new_zeros((len(batch.ids), self.config.hidden_size))
                if taps is not None:
                    for later in (tap for tap in taps.layers if tap > index):
                        taps.put(later, nothing)
                return nothing
        return self._spread(batch, flow, self.ops.hyper_collapse(flow.x, flow.pre))

    def see(self, pixels: Tensor) -> Tensor:
        """An image's positions [tokens, D], from uint8[height, width, 3]."""
        assert self.vision is not None, "this checkpoint does not see"
        vision, (height, width) = self.vision, pixels.shape[:2]
        plan = plan_sized(width, height, vision.config)
        dtype = self._activations or torch.float32
        return vision.span(patches_of(pixels, plan, vision.config.patch, dtype), plan)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden), torch.float32)

    def _begin(self, batch: DeviceBatch) -> tuple[Flow, Tensor | None]:
        """The streams before the first layer, and every Engram row of the step, sent for."""
        rows = None
        if self._hash is not None:
            assert batch.history is not None
            rows = self.ops.engram_rows(batch.ids, batch.history, self._hash)
            self._prefetch(rows)
            if batch.ahead is not None:
                self._prefetch(self.ops.engram_rows(*batch.ahead, self._hash))
        x = self.ops.embedding(batch.ids, self.embed.weight).to(self._activations)
        if batch.images is not None:
            x = x.index_copy(0, *batch.images)
        x = x[:, None].repeat(1, self.config.streams, 1)
        pre = torch.zeros(x.shape[:2], device=x.device)
        pre[:, 0] = 1
        return Flow(batch, x, pre, None, batch.ids == self.config.image_token), rows

    def _prefetch(self, rows: Tensor) -> None:
        """Send for table rows int64[T, layers, columns]."""
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                layer.engram.table.prefetch(rows[:, self._engram_index(index)])

    def _engram_index(self, layer: int) -> int:
        assert self.config.engram is not None
        return self.config.engram.layers.index(layer)

    def _spread(self, batch: DeviceBatch, flow: Flow, rows: Tensor) -> Tensor:
        """Rows of the flow at their places in the whole step."""
        if flow.batch is batch:
            return rows
        assert batch.late_rows is not None
        whole = rows.new_zeros((len(batch.ids), rows.shape[1]))
        whole[batch.late_rows] = rows
        return whole


def engram_hash(config: DeepseekV41Config, device: torch.device | None) -> EngramHash | None:
    """What turns ids into table rows; None for a model without Engram.

    Raises:
        ModelLoadError: there is no tokenizer, or it belongs to another model.
    """
    if config.engram is None:
        return None
    if config.tokenizer is None or not config.tokenizer.is_file():
        raise ModelLoadError(
            "Engram's rows follow from the model's tokenizer.json, and there is none.",
            setting="tokenizer",
            next_step="It has to lie beside config.json.",
        )
    ids = token_map(config.tokenizer, config.vocab_size)
    found = hash_constants(config.engram, ids, config.image_token)
    return found._replace(
        token_map=found.token_map.to(device),
        multipliers=found.multipliers.to(device),
        primes=found.primes.to(device),
        offsets=found.offsets.to(device),
    )
