"""What both front doors share: how an engine is opened, asked about itself and closed.

Where you are: below ``LLM`` and ``AsyncLLM``, which differ only in how they wait.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from deepinfer.config import EngineConfig, SpeculativeConfig
from deepinfer.entrypoints.assemble import Assembly, assemble
from deepinfer.entrypoints.driver import Driver
from deepinfer.errors import TokenizerError
from deepinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.tokenizer import Tokenizer


class FrontDoor:
    """An engine with its driver. Dropping the object gives everything back.

    Args: those of :class:`deepinfer.config.EngineConfig`, under the same names. None for
        ``batch_invariant`` leaves it to ``DEEPINFER_BATCH_INVARIANT``.
    """

    def __init__(
        self,
        model: str,
        tokenizer: str | None = None,
        *,
        revision: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        backend: str | None = None,
        device: Literal["cpu", "cuda", "npu"] | None = None,
        quantization: Literal["int8", "fp8"] | None = None,
        load_format: Literal["auto", "dummy"] = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        page_size: int = 16,
        kv_cache_memory: int | str | None = None,
        kv_cache_dtype: Literal["auto", "bfloat16", "packed"] = "auto",
        yoco_prefill_truncation_mode: Literal["compact", "mask", "off", "exact"] | None = None,
        yoco_prefill_keep_tokens: int | None = None,
        dequantize_weights: bool | None = None,
        gpu_memory_utilization: float = 0.9,
        seed: int | None = 0,
        batch_invariant: bool | None = None,
        enable_prefix_caching: bool = True,
        overlap: bool = True,
        scheduling_policy: str = "fcfs",
        executor: str = "local",
        speculative: str | Mapping[str, Any] | SpeculativeConfig | None = None,
        num_threads: int | None = None,
        generation_config: Literal["auto", "none"] = "auto",
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        data_parallel_size: int = 1,
        context_parallel_size: int = 1,
        grammar_backend: str | None = None,
        grammar_acceleration: Literal["auto", "cpu", "cuda"] = "auto",
        disable_plugins: str | Sequence[str] = (),
        plugin_config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        config = EngineConfig.make(
            model=model,
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            backend=backend,
            device=device,
            quantization=quantization,
            load_format=load_format,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            kv_cache_memory=kv_cache_memory,
            kv_cache_dtype=kv_cache_dtype,
            yoco_prefill_truncation_mode=yoco_prefill_truncation_mode,
            yoco_prefill_keep_tokens=yoco_prefill_keep_tokens,
            dequantize_weights=dequantize_weights,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            batch_invariant=batch_invariant,
            enable_prefix_caching=enable_prefix_caching,
            overlap=overlap,
            scheduling_policy=scheduling_policy,
            executor=executor,
            speculative=speculative,
            num_threads=num_threads,
            generation_config=generation_config,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel_size=expert_parallel_size,
            data_parallel_size=data_parallel_size,
            context_parallel_size=context_parallel_size,
            grammar_backend=grammar_backend,
            grammar_acceleration=grammar_acceleration,
            disable_plugins=disable_plugins,
            plugin_config=plugin_config,
        )
        self._open(assemble(config))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """From a configuration made elsewhere."""
        return cls.from_assembly(assemble(config))

    @classmethod
    def from_assembly(cls, assembly: Assembly) -> Self:
        """From parts put together elsewhere (tests, embedders with an executor of their own)."""
        front = cls.__new__(cls)
        front._open(assembly)
        return front

    def _open(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self._driver = Driver(assembly.engine)
        self._ids = itertools.count()
        # Runs when this object is dropped and at exit; the driver knows nothing of it.
        self._finalizer = weakref.finalize(self, self._driver.close)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: ``encode`` and ``decode``.

        Raises:
            TokenizerError: dummy weights were opened without one.
        """
        if self.assembly.tokenizer is None:
            raise TokenizerError("This engine has no tokenizer.", setting="tokenizer")
        tokenizer: Tokenizer = self.assembly.tokenizer
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What calls without parameters use: the checkpoint's ``generation_config.json``.

        ``generation_config="none"`` makes it plain ``SamplingParams()``.
        """
        return self.assembly.default_params

    def close(self, timeout: float | None = None) -> None:
        """End what runs and give everything back; waits for it. May be called twice."""
        self._finalizer.detach()
        self._driver.close(timeout)
