"""Core's own rooms, sold through the same hooks as anybody's.

A window like every plugin's: light, so that listing what core has imports none of it.
"""

from __future__ import annotations

from deepinfer.api.hookspecs import hookimpl
from deepinfer.api.specs import (
    BackendSpec,
    ExecutorSpec,
    ModelSpec,
    PolicySpec,
    RecipeSpec,
    SamplerSpec,
    Spec,
)


def native_kernels() -> str | None:
    """None if compiled kernels lie beside the package and belong to it; loads no torch."""
    from deepinfer.native import misfit

    return misfit()


@hookimpl
def deepinfer_provide() -> list[Spec]:
    """Everything in ``deepinfer-core`` that a configuration can name."""
    return [*_backends(), *_models(), *_engine_rooms(), *_recipes()]


def _backends() -> list[Spec]:
    return [
        BackendSpec(
            name="reference",
            load="deepinfer.ops.backend:ReferenceBackend",
            offers=frozenset({"invariant", "int8"}),
        ),
        BackendSpec(
            name="cpu",
            load="deepinfer.native.backend:NativeCPUBackend",
            priority=10,
            probe=native_kernels,
            offers=frozenset({"invariant", "int8"}),
        ),
    ]


def _models() -> list[Spec]:
    return [
        ModelSpec(
            name="llama",
            load="deepinfer.models.llama:LlamaAdapter",
            architectures=("LlamaForCausalLM", "MistralForCausalLM"),
        ),
        ModelSpec(
            name="qwen2",
            load="deepinfer.models.qwen2:Qwen2Adapter",
            architectures=("Qwen2ForCausalLM",),
        ),
        ModelSpec(
            name="qwen3",
            load="deepinfer.models.qwen3:Qwen3Adapter",
            architectures=("Qwen3ForCausalLM",),
        ),
        ModelSpec(
            name="qwen3_moe",
            load="deepinfer.models.qwen3_moe:Qwen3MoeAdapter",
            architectures=("Qwen3MoeForCausalLM",),
        ),
        ModelSpec(
            name="deepseek_v41",
            load="deepinfer.models.deepseek_v41.adapter:DeepseekV41Adapter",
            architectures=("DeepseekV41ForCausalLM",),
        ),
    ]


def _engine_rooms() -> list[Spec]:
    policies = "deepinfer.engine.policy"
    return [
        PolicySpec(name="fcfs", load=f"{policies}:FCFSPolicy", priority=1),
        PolicySpec(name="priority", load=f"{policies}:PriorityPolicy"),
        ExecutorSpec(name="local", load="deepinfer.executors.local:LocalExecutor"),
        SamplerSpec(name="gumbel", load="deepinfer.sampling.sampler:GumbelSampler"),
    ]


def _recipes() -> list[Spec]:
    recipes = {
        "classify": ("Classification", "labels or the fields of a type, for a text"),
        "ner": ("NamedEntities", "named entities and where they stand"),
        "sql": ("SQLGeneration", "a query for a question, over a given database"),
        "transform": ("Transformation", "a document into a given type"),
    }
    return [
        RecipeSpec(name=name, load=f"deepinfer.recipes:{of}", about=about)
        for name, (of, about) in recipes.items()
    ]
