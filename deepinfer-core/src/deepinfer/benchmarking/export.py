"""A model's weights as files that peers read: safetensors in fp32, a GGUF file in F32 or Q8_0.

Where you are: beside ``harness``. A comparison means little if the engines run other weights, so
what was quantised in the source is written out as the numbers that DeepInfer computes with. Files
go to the cache folder, once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer import settings
from deepinfer.errors import UnsupportedError


def as_safetensors(model: str, tell: Callable[[str], None]) -> Path:
    """A directory with config.json and model.safetensors, fp32."""
    import torch
    from safetensors.torch import save_file

    from deepinfer.models.checkpoint import open_checkpoint
    from deepinfer.models.source import resolve

    source = resolve(model)
    if source.kind == "hf":
        return source.path
    checkpoint = open_checkpoint(source)
    target = settings.cache_dir() / "bench" / checkpoint.fingerprint()[:16]
    if (target / "config.json").exists():
        return target
    tell(f"writing the weights of {source.name} as safetensors")
    target.mkdir(parents=True, exist_ok=True)
    tensors = {n: checkpoint.tensor(n, torch.float32) for n in checkpoint.names()}
    part = target / f"part-{os.getpid()}"
    save_file(tensors, str(part), metadata={"format": "pt"})
    part.replace(target / "model.safetensors")
    config = {**checkpoint.config, "torch_dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def as_gguf(model: str, tell: Callable[[str], None], kind: str = "F32") -> Path:
    """The model's own GGUF file with every matrix in F32 or Q8_0 (vectors stay F32)."""
    import gguf

    from deepinfer.models.source import resolve

    source = resolve(model)
    if source.kind != "gguf":
        raise UnsupportedError(
            f"llama.cpp needs a GGUF file, and {source.name} is a directory.",
            next_step="Give a GGUF model, or leave llama.cpp out.",
        )
    size = source.path.stat().st_size
    target = settings.cache_dir() / "bench" / f"{source.path.stem}-{size}-{kind.lower()}.gguf"
    if target.exists():
        return target
    tell(f"writing the weights of {source.name} as a GGUF file")
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source.path)
    part = target.with_suffix(f".part-{os.getpid()}")
    writer = gguf.GGUFWriter(part, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        _copy_field(gguf, writer, field)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        numbers = numbers.astype("float32")
        if kind == "F32" or numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers)
        else:
            packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)
    return target


def _copy_field(gguf: Any, writer: Any, field: Any) -> None:
    """One metadata entry as it stands; the writer sets the architecture and the header itself."""
    if field.name.startswith("GGUF.") or field.name == "general.architecture":
        return
    kind = field.types[0]
    value = 0 if field.name == "general.file_type" else field.contents()  # 0: all F32
    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, value, kind, sub_type=inner)
