"""DeepInfer: a plugin-based LLM inference engine.

Exports are lazy (PEP 562), so that ``import deepinfer`` loads neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.entrypoints.async_llm import AsyncLLM
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.entrypoints.outputs import CompletionOutput, RequestOutput
    from deepinfer.errors import DeepInferError
    from deepinfer.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "DeepInferError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "deepinfer.entrypoints.llm",
    "AsyncLLM": "deepinfer.entrypoints.async_llm",
    "CompletionOutput": "deepinfer.entrypoints.outputs",
    "RequestOutput": "deepinfer.entrypoints.outputs",
    "DeepInferError": "deepinfer.errors",
    "SamplingParams": "deepinfer.sampling_params",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
