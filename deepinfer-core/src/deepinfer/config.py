"""Everything that shapes an engine: :class:`EngineConfig`, frozen, with one ``check()``.

Names are those that users of vLLM and SGLang know. What is known and not built is refused here by
name, all reasons at once.
"""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from deepinfer import settings
from deepinfer.errors import ConfigError, UnsupportedError, shown

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
# What no path, no name and no size is beyond, so that a message can quote it.
_Place = Annotated[str, Field(max_length=4096)]
_Name = Annotated[str, Field(max_length=256)]
_Count = Annotated[int, Field(ge=1, lt=2**63)]
_NOT_BUILT = (
    "tensor_parallel_size",
    "expert_parallel_size",
    "data_parallel_size",
    "context_parallel_size",
)


def parse_bytes(value: Any) -> Any:
    """``"2GiB"``, ``"500MB"`` or a number of bytes to int; anything else is left to pydantic."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+)(?:\.(\d+))?\s*([kmg]?i?)b?\s*", value.lower())
    if match is None or match[3] not in _UNITS:
        raise ValueError('expected bytes, as 2147483648, "2GiB" or "500MB"')
    part = match[2] or ""
    return int(match[1] + part) * _UNITS[match[3]] // 10 ** len(part)


_NEXTN = "DEEPINFER_USE_NEXTN_DECODE"


class SpeculativeConfig(BaseModel):
    """How to speculate. With acceptance ``exact`` it changes speed and nothing else.

    Args:
        method: a speculator plugin's name (``ngram``, …). None: who reads ``model``, else who finds
            a draft in the target's own checkpoint.
        model: a draft checkpoint, or a name that the method knows.
        num_speculative_tokens: draft length; None takes DEEPINFER_USE_NEXTN_DECODE, else 5 or what
            the draft was trained for, whichever is less. 0 is off.
        mode: ``adaptive`` verifies as many drafts as pay at the present load, by measured costs;
            ``static`` verifies all; ``cap`` verifies all and keeps as many as ``adaptive`` would
            have verified, to compare; ``off`` does not speculate.
        acceptance: ``exact``: the text is the one without speculation. ``ratio``: more drafts stand
            where tokens are sampled, and only the distribution is the same.
        options: further options of the method, named in any place of the mapping.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: _Name | None = None
    model: _Place | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=settings.LONGEST_DRAFT)
    mode: Literal["adaptive", "static", "cap", "off"] = "adaptive"
    acceptance: Literal["exact", "ratio"] = "exact"
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: Any) -> Any:
        """A name, a path, ``key=value,…`` or a mapping; what is no field is an option."""
        if isinstance(given, os.PathLike):
            given = {"model": os.fspath(given)}
        if isinstance(given, str):
            given = _from_text(given)
        if not isinstance(given, dict):
            return given
        fields = {key: value for key, value in given.items() if key in cls.model_fields}
        more = {str(key): value for key, value in given.items() if key not in cls.model_fields}
        return {**fields, "options": {**(fields.get("options") or {}), **more}} if more else fields

    @property
    def asked_length(self) -> tuple[str, int | None]:
        """What says how long drafts are, and what it says: argument, then environment."""
        if self.num_speculative_tokens is None and settings.is_set(_NEXTN):
            return _NEXTN, settings.read(_NEXTN)
        return "num_speculative_tokens", self.num_speculative_tokens

    def draft_length(self, trained: int | None, usual: int | None = None) -> int:
        """The draft length for a draft of this trained length (None: of any).

        Args:
            usual: what a method takes where nobody asked; None: the variable's default.

        Raises:
            ConfigError: more was asked for than it was trained for.
        """
        name, asked = self.asked_length
        if asked is None:
            length: int = settings.SETTINGS[_NEXTN].default if usual is None else usual
            return length if trained is None else min(length, trained)
        if trained is not None and asked > trained:
            raise ConfigError(
                f"{name}={asked}: this draft proposes blocks of at most {trained} tokens.",
                setting=name,
                next_step=f"Give 0 (off) to {trained}.",
            )
        return asked


def _from_text(text: str) -> Any:
    """``off``, a method's name, a path or hub id, a JSON object, or ``key=value,key=value``."""
    text = text.strip()
    if text == "off":
        return {"mode": "off"}
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as why:
            raise ValueError(f"expected a JSON object ({why})") from None
    if "=" in text:
        pairs = [_pair(part.strip()) for part in text.split(",")]
        if len(dict(pairs)) < len(pairs):
            raise ValueError("expected every name once")
        return dict(pairs)
    return dict([_named(text)])


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not key:
        raise ValueError("expected key=value,key=value; a part of it has no key")
    if not equals:
        return _named(key)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _named(text: str) -> tuple[str, str]:
    """A path or hub id has a slash, a method has none."""
    return "model" if {"/", os.sep} & set(text) else "method", text


class EngineConfig(BaseModel):
    """The engine's arguments.

    Args:
        model: a Hugging Face directory, a GGUF file, a hub id, or ``demo``.
        tokenizer: where the tokenizer lies, if not with the model.
        revision: of a hub id.
        dtype: activations and KV; ``auto`` is float32 on a CPU, else the checkpoint's.
        backend: a backend plugin's name; None takes the usable one of highest priority.
        device: ``cpu``, ``cuda`` or ``npu``: only backends of that device type are candidates.
        quantization: of the weights of layers and head, as they are loaded. ``int8`` (on a CPU): a
            scale for each 32 values; rows are rounded alike where they meet one (as llama.cpp does
            with Q8_0). ``fp8`` (on CUDA): E4M3 with a power of two for each 32×32 tile; rows stay.
        load_format: ``auto`` reads the checkpoint; ``dummy`` fills the shapes of its config.json
            with random numbers on the device, to measure with (no weight file is needed, and
            without a tokenizer prompts are token ids).
        max_model_len: longest text in tokens; None takes the model's own.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step; longer prefills run in chunks. None takes
            what fills the backend (512 on a CPU: more gains nothing and costs memory).
        page_size: tokens per KV page.
        kv_cache_memory: bytes of KV (``"2GiB"`` too); None sizes it from what is free.
        kv_cache_dtype: how a model that defines its own KV formats stores them: ``packed``, as
            few bytes as they need, or ``bfloat16``, the same values; ``auto`` is packed there, and
            ``dtype`` for all other models, which refuse the rest.
        yoco_prefill_truncation_mode: how models whose late layers keep no KV of all tokens (YOCO)
            skip them on a prompt's beginning: ``compact`` takes the rows out, ``mask`` runs them to
            no effect, ``exact`` keeps enough that nothing changes, ``off`` runs all. None takes
            DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE. With ``batch_invariant`` those that change
            results become ``exact``. Other models refuse it.
        yoco_prefill_keep_tokens: rows that ``compact`` and ``mask`` keep. None takes
            DEEPINFER_YOCO_PREFILL_KEEP_TOKENS.
        dequantize_weights: turn weights stored in few bits into ``dtype`` when they are loaded;
            False multiplies them as stored; None leaves it to the backend.
        gpu_memory_utilization: share of the device's memory that the engine may use.
        seed: where seeds of requests without one come from; None takes the system's entropy.
        batch_invariant: results may not depend on the batch; what cannot keep it is refused.
        enable_prefix_caching: reuse KV of equal prefixes.
        overlap: plan one step ahead of the device (False only moves the wait up).
        scheduling_policy: a policy's name.
        speculative: None, or what to draft with: a method's name, a draft checkpoint, or a mapping
            with the fields of :class:`SpeculativeConfig`. None takes DEEPINFER_ENABLE_MTP_VARLEN,
            which speculates with the draft that the checkpoint carries.
        num_threads: CPU threads of the native kernels; None takes torch's number.
        generation_config: ``auto`` takes sampling defaults from the checkpoint for calls that
            pass no SamplingParams; ``none`` ignores them. End tokens always come from it.
        trust_remote_code: accepted for the published example. No code of a checkpoint is run.
        grammar_backend: a grammar plugin's name, for structured output; None takes the best usable
            one if there is any.
        grammar_acceleration: who applies grammars' masks to logits (the op ``apply_bitmask``):
            ``auto`` the backend, ``cpu`` core's reference, ``cuda`` a kernel of a CUDA backend.
        disable_plugins: names that may not be used, one or several.
        plugin_config: one mapping per plugin name, handed to it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: _Place
    tokenizer: _Place | None = None
    revision: _Name | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    backend: _Name | None = None
    device: Literal["cpu", "cuda", "npu"] | None = None
    quantization: Literal["int8", "fp8"] | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2, lt=2**63)
    max_num_seqs: int = Field(default=256, ge=1, le=65536)
    max_num_batched_tokens: _Count | None = None
    page_size: _Count = 16
    kv_cache_memory: _Count | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "packed"] = "auto"
    yoco_prefill_truncation_mode: Literal["compact", "mask", "off", "exact"] | None = None
    yoco_prefill_keep_tokens: _Count | None = None
    dequantize_weights: bool | None = None
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    seed: int | None = 0
    batch_invariant: bool = False
    enable_prefix_caching: bool = True
    overlap: bool = True
    scheduling_policy: _Name = "fcfs"
    executor: _Name = "local"
    speculative: SpeculativeConfig | None = None
    num_threads: int | None = Field(default=None, ge=1, le=4096)
    generation_config: Literal["auto", "none"] = "auto"
    trust_remote_code: bool = False
    tensor_parallel_size: _Count = 1
    expert_parallel_size: _Count = 1
    data_parallel_size: _Count = 1
    context_parallel_size: _Count = 1
    grammar_backend: _Name | None = None
    grammar_acceleration: Literal["auto", "cpu", "cuda"] = "auto"
    disable_plugins: tuple[_Name, ...] = ()
    plugin_config: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def __init__(self, **arguments: Any) -> None:
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            raise _explain(error) from None

    @field_validator("model", "tokenizer", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    @field_validator("kv_cache_memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return parse_bytes(value)

    @field_validator("disable_plugins", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """A text is one name, and no sequence of letters."""
        return () if value is None else (value,) if isinstance(value, str) else value

    @field_validator("plugin_config", mode="before")
    @classmethod
    def _mappings(cls, value: Any) -> Any:
        return {} if value is None else value

    @classmethod
    def make(cls, **arguments: Any) -> EngineConfig:
        """Arguments, then environment, then defaults; raises :class:`ConfigError` naming each.

        The one place that takes keyword arguments through: they are the fields above.
        """
        given = dict(arguments)
        given["batch_invariant"] = settings.read(
            "DEEPINFER_BATCH_INVARIANT", given.get("batch_invariant")
        )
        if given.get("speculative") is None and settings.read("DEEPINFER_ENABLE_MTP_VARLEN"):
            given["speculative"] = {}
        accelerator = settings.read("DEEPINFER_ACCELERATOR")
        if given.get("device") is None and accelerator is not None:
            given["device"] = {"nvidia": "cuda", "ascend": "npu"}[accelerator]
        config = cls(**given)
        config.check()
        return config

    def check(self) -> None:
        """Refuse what is not built, all reasons at once; and variables that say nothing known."""
        self.truncation()
        problems = [
            f"{name}={getattr(self, name)}: only 1 works in this version"
            for name in _NOT_BUILT
            if getattr(self, name) != 1
        ]
        asked = self.speculation()
        if asked is not None and asked.acceptance == "ratio" and self.batch_invariant:
            problems.append(
                "acceptance='ratio' (speculative): with it a text depends on how many drafts are "
                "verified, so on the load, and batch_invariant cannot be kept"
            )
        if problems:
            raise UnsupportedError("; ".join(problems) + ".", setting=problems[0].split("=")[0])

    def speculation(self) -> SpeculativeConfig | None:
        """How to speculate; None if nobody does, whether not asked for or switched off."""
        asked = self.speculative
        if asked is None or asked.mode == "off" or asked.asked_length[1] == 0:
            return None
        return asked

    def truncation(
        self,
    ) -> tuple[Literal["compact", "mask", "off", "exact"], int, frozenset[str]]:
        """(mode, rows kept, which of the two arguments were given).

        Where results may not depend on the batch they may not depend on where a prompt ends
        either, as an approximation of its end does.
        """
        names = ("yoco_prefill_truncation_mode", "yoco_prefill_keep_tokens")
        given = {name: getattr(self, name) for name in names}
        mode, keep = (settings.read(f"DEEPINFER_{name.upper()}", given[name]) for name in names)
        if self.batch_invariant and mode != "off":
            mode = "exact"
        return mode, keep, frozenset(name for name in names if given[name] is not None)

    def needs(self) -> frozenset[str]:
        """Capabilities that the chosen backend must offer."""
        wanted = {"invariant"} if self.batch_invariant else set()
        return frozenset(wanted | ({self.quantization} if self.quantization else set()))


def _explain(error: ValidationError) -> ConfigError:
    lines, first = [], None
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        first = first or where
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: no such engine argument")
        else:
            reason = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where}={shown(item['input'])}: {reason}")
    return ConfigError("; ".join(lines) + ".", setting=first)
