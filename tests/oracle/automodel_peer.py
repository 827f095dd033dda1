"""DeepSeek-V4.1 of the package ``nemo-automodel``: whole texts, no caches, float32 on a CPU.

It is used as it is, but for two things. Its top-k leaves ties to the library; here the lowest
index wins, as in the model's definition. And it quantises what is cached, but not what linears
read: ``quantised`` says whether nothing, its own three or all of the released model's quantisers
run, always with its own quantiser.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention
from nemo_automodel.components.models.deepseek_v41.attention import DeepseekV41AttentionState
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

# Linears whose input the released model quantises (specification 8.4); experts do it inside too.
SCALED = (
    *("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "attn.indexer.wq_b", "engram.wkv"),
    *("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"),
    "ffn.experts",
)


class LayerSteps(NamedTuple):
    """What one layer made, a row a token."""

    stream: Tensor  # [T, n, D]
    pre: Tensor  # [T, n], the mix that the next layer collapses with
    mixes: tuple  # (pre, post, comb) of attention and of the experts
    engram: Tensor | None  # [T, n, D]
    attention: Tensor  # [T, D]
    experts: Tensor  # [T, D]
    router: tuple[Tensor, Tensor]  # ids, weights [T, k]
    selected: Tensor | None  # [T, k], −1 for none
    candidates: Tensor | None  # bool[T, entries]
    compressed: Tensor | None  # [entries, d]
    index_keys: Tensor | None  # [entries, di]


class Peer:
    """The model of a golden checkpoint."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        raw["dtype"] = raw["text_config"]["dtype"] = "float32"
        sees = raw["vision_config"]["num_hidden_layers"] > 0
        self.image_token = raw["image_token_id"] if sees else -1
        backend = BackendConfig(
            attn="eager",
            linear="torch",
            rms_norm="torch_fp32",
            rope="torch",
            rope_fusion=False,
            experts="torch",
            dispatcher="torch",
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        config = DeepseekV41Config(**raw)
        self.model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer).eval()
        released = load_file(folder / "model.safetensors")
        found = self.model.load_state_dict(
            self.model.state_dict_adapter.from_hf(released), strict=False
        )
        # A model without vision stores no bias for image rows.
        assert not found.unexpected_keys
        assert all(key.endswith("gate.bias_vl") for key in found.missing_keys)

    def logits(self, ids: Tensor, which: str) -> tuple[Tensor, list[LayerSteps]]:
        """(float32[T, V], what each layer made) of a whole text."""
        with self._recorded(which) as layers:
            hidden, _ = self.model.model(ids[None], image_mask=self._images(ids))
            return self.model.lm_head(hidden)[0], layers()

    def from_inputs(self, ids: Tensor, which: str, inputs: list) -> list[LayerSteps]:
        """What each layer makes of (streams before its Engram [T, n, D], mix [T, n]) given.

        Entries, keys and choices of sources come from this model, on the inputs given.
        """
        model, images = self.model.model, self._images(ids)
        mask = None if images is None else ~images
        positions, state = torch.arange(len(ids))[None], DeepseekV41AttentionState()
        with self._recorded(which) as layers:
            rows = model.engram_hash(ids[None], token_mask=mask)
            for layer, (x, pre) in zip(model.layers.values(), inputs, strict=True):
                engram = layer.engram
                _, _, state = layer(
                    x[None],
                    pre[None],
                    state,
                    position_ids=positions,
                    image_mask=images,
                    engram_hash_ids=engram and rows[:, :, engram.layer_hash_index],
                )
            return layers()

    def _images(self, ids: Tensor) -> Tensor | None:
        images = ids[None] == self.image_token
        return images if bool(images.any()) else None

    @contextmanager
    def _recorded(self, which: str) -> Iterator[Callable[[], list[LayerSteps]]]:
        """Everything above in one: no gradients, ties, quantisers, and what modules returned."""
        heard: dict[str, Any] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, args, out: heard.__setitem__(name, out)

        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(mock.patch.object(torch.Tensor, "topk", stable_topk))
            stack.enter_context(quantised(self.model, which))
            for name, module in self.model.model.layers.named_modules():
                if name:
                    handle = module.register_forward_hook(keep(name))
                    stack.callback(handle.remove)
            yield lambda: [_steps(heard, i) for i in range(len(self.model.model.layers))]


def _steps(heard: dict[str, Any], layer: int) -> LayerSteps:
    def of(name: str) -> Any:
        return heard.get(f"{layer}.{name}")

    stream, pre, state = heard[str(layer)]
    weights, ids = of("ffn.gate")[:2]
    source, chooses = of("attn.compressor") is not None, of("attn.indexer") is not None

    def first(tensor: Tensor | None, wanted: bool = True) -> Tensor | None:
        return tensor[0] if wanted and tensor is not None else None

    return LayerSteps(
        stream=stream[0],
        pre=pre[0],
        mixes=tuple(tuple(part[0] for part in of(f"{s}_hc")) for s in ("attn", "ffn")),
        engram=first(of("engram")),
        attention=of("attn").hidden_states[0],
        experts=of("ffn")[0],
        router=(ids, weights),
        selected=first(state.topk_indices, chooses),
        candidates=first(state.candidates, chooses),
        compressed=first(state.compressed_kv, source),
        index_keys=first(state.index_keys, source),
    )


@contextmanager
def quantised(model: torch.nn.Module, which: str) -> Iterator[None]:
    """``off``, ``caches`` (as the package is) or ``all``."""
    real = attention.quantize_cache

    def fp8(x: Tensor) -> Tensor:
        return real(x, format="fp8", block_size=32)

    def same(values: Tensor, *, format: str, block_size: int) -> Tensor:
        return values

    def activate(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: fp8(inner(x, weight))

    with ExitStack() as stack:
        if which == "off":
            stack.enter_context(mock.patch.object(attention, "quantize_cache", same))
        for name, module in model.named_modules() if which == "all" else ():
            if name.startswith("model.layers.") and name.endswith(SCALED):
                handle = module.register_forward_pre_hook(lambda _, args: (fp8(args[0]), *args[1:]))
                stack.callback(handle.remove)
            if name.endswith("ffn.experts"):
                inner = activate(module.expert_activation_grouped)
                stack.enter_context(mock.patch.object(module, "expert_activation_grouped", inner))
        yield


def stable_topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> torch.return_types.topk:
    """``Tensor.topk`` whose ties go to the lowest index."""
    assert largest
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))
