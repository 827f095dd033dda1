"""From a checkpoint's architecture to the adapter that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.api.model import ImageReader, ModelAdapter
from deepinfer.errors import ModelLoadError, UnsupportedError
from deepinfer.models.deepseek_v41.adapter import DeepseekV41Adapter
from deepinfer.models.llama import LlamaAdapter
from deepinfer.models.qwen2 import Qwen2Adapter
from deepinfer.models.qwen3 import Qwen3Adapter
from deepinfer.models.qwen3_moe import Qwen3MoeAdapter

if TYPE_CHECKING:
    from deepinfer.models.checkpoint import Checkpoint
    from deepinfer.resolution import Resolution

BUILT_IN: tuple[type[ModelAdapter], ...] = (
    LlamaAdapter,
    Qwen2Adapter,
    Qwen3Adapter,
    Qwen3MoeAdapter,
    DeepseekV41Adapter,
)


def architectures_of(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The ``architectures`` of a config.json."""
    found = raw.get("architectures")
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ModelLoadError(
            "The model's config.json names no architecture.",
            setting="architectures",
            next_step='It needs a line such as "architectures": ["LlamaForCausalLM"].',
        )
    return tuple(found)


def adapter_for(architecture: str) -> ModelAdapter:
    """The built-in adapter of an architecture, without plugins."""
    for adapter in BUILT_IN:
        if architecture in adapter.architectures:
            return adapter()
    known = ", ".join(name for adapter in BUILT_IN for name in adapter.architectures)
    raise UnsupportedError(
        f"The architecture {architecture!r} is not built.",
        setting="architectures",
        next_step=f"Known: {known}.",
    )


def model_config(adapter: ModelAdapter, checkpoint: Checkpoint) -> Any:
    """The family's config of a checkpoint.

    Whether its head is tied, the checkpoint knows best; where its tokenizer lies, nobody else.
    """
    known: dict[str, Any] = {"tie_word_embeddings": checkpoint.tied}
    folder = next((checkpoint.file(name).parent for name in checkpoint.names()), None)
    if folder is not None:
        known["tokenizer_file"] = str(folder / "tokenizer.json")
    return adapter.config({**checkpoint.config, **known})


def image_reader(adapter: ModelAdapter, raw: Mapping[str, Any]) -> ImageReader | None:
    """What prepares pictures for the model of a config.json; None where it takes none."""
    make = getattr(adapter, "image_reader", None)  # most families do not see
    reader: ImageReader | None = None if make is None else make(raw)
    return reader


def adapter_of(resolution: Resolution) -> ModelAdapter:
    """The adapter that plugins were resolved to, built-in or not."""
    adapter: ModelAdapter = resolution.load("model")()
    return adapter
