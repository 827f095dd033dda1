"""What a caller may ask of one request: :class:`SamplingParams`, :class:`StructuredSpec`.

Field names are those that users of vLLM know; ``seq_seed`` is another spelling of ``seed`` and
``so_args`` of structured output. Everything is checked here, before a request is queued; what
needs the vocabulary or the context length is checked at submission.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from deepinfer.structured.spec import Frozen, StructuredOutputsParams, StructuredSpec, as_tuple

__all__ = ["SCHEMA_TYPES", "SamplingParams", "StructuredOutputsParams", "StructuredSpec"]

SCHEMA_TYPES = ("json", "regex", "ebnf", "choice", "json_object", "structural_tag")
_SEED_BITS = 64


class SamplingParams(Frozen):
    """How to sample one request.

    Args:
        n: parallel samples of one prompt; sample i draws with ``mix(seed, i)``.
        temperature: 0 is greedy; the draw is ``argmax(z/T + Gumbel noise)``.
        top_k: keep the k best; 0 or −1 keeps all.
        top_p: keep the smallest set of probability ≥ top_p.
        min_p: keep what has at least min_p of the best probability.
        presence_penalty, frequency_penalty: −2 … 2, over output tokens.
        repetition_penalty: > 0, over prompt and output tokens; 1 is off.
        logit_bias: id → number added to its logit (−100 … 100).
        bad_words: texts that may not appear.
        allowed_token_ids: nothing else may be sampled.
        stop: texts that end the output, also across token borders; not part of the output
            unless ``include_stop_str_in_output``.
        stop_token_ids: ids that end the output.
        ignore_eos: the model's own end tokens do not end the output.
        min_tokens, max_tokens: bounds of the output length; ``max_tokens`` None runs to the
            context's end.
        seed, seq_seed: 64 bits; the same seed gives the same text whatever runs beside it. One of
            them, or both if equal. None draws one at admission.
        logprobs: None, or how many best candidates to report per output token (0: only the
            token itself, −1: the whole vocabulary).
        prompt_logprobs: the same for prompt tokens.
        skip_special_tokens, spaces_between_special_tokens, detokenize: text making.
        output_kind: what ``AsyncLLM`` yields: all so far, only news, or only the end.
        so_args: ``{"schema_type": …, "schema": …}``, see :class:`StructuredSpec`.
            ``structured_outputs={"json": …}`` says the same in vLLM's words.
    """

    n: int = Field(default=1, ge=1, le=4096)
    temperature: float = Field(default=1.0, ge=0.0)
    top_k: int = Field(default=0, ge=-1)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=16, ge=1)
    seed: int | None = None
    seq_seed: int | None = None
    logprobs: int | None = Field(default=None, ge=-1)
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: Literal["cumulative", "delta", "final_only"] = "cumulative"
    so_args: StructuredSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        """``structured_outputs`` becomes ``so_args``."""
        if not isinstance(data, Mapping) or data.get("structured_outputs") is None:
            return data
        given = dict(data)
        wish = given.pop("structured_outputs")
        if given.get("so_args") is not None:
            raise ValueError("so_args and structured_outputs name the same thing; give one of them")
        if isinstance(wish, Mapping):
            wish = StructuredOutputsParams(**wish)
        if not isinstance(wish, StructuredOutputsParams):
            raise ValueError(f"structured_outputs cannot be {type(wish).__name__}")
        return {**given, "so_args": wish.so_args()}

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        texts = () if value is None else (value,) if isinstance(value, str) else as_tuple(value)
        if any(text == "" for text in texts):
            raise ValueError("an empty text is not allowed")
        return texts

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _no_ids(cls, value: Any) -> Any:
        return () if value is None else as_tuple(value)

    @field_validator("allowed_token_ids")
    @classmethod
    def _some_ids(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and not value:
            raise ValueError("an empty list allows nothing; leave it None to allow all")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_range(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        for token, bias in (value or {}).items():
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"the bias of id {token} must lie in -100 … 100")
        return value

    @field_validator("temperature", "min_p", "repetition_penalty")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be finite")
        return value

    @field_validator("seed", "seq_seed")
    @classmethod
    def _seed_range(cls, value: int | None) -> int | None:
        if value is not None and not -(1 << (_SEED_BITS - 1)) <= value < 1 << _SEED_BITS:
            raise ValueError("a seed has 64 bits")
        return value

    @model_validator(mode="after")
    def _together(self) -> SamplingParams:
        if self.seed is not None and self.seq_seed is not None and self.seed != self.seq_seed:
            raise ValueError(
                f"seed={self.seed} and seq_seed={self.seq_seed} name the same thing and differ; "
                "give one of them"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if not self.detokenize and self.stop:
            raise ValueError("stop texts need detokenize=True")
        return self

    @property
    def effective_seed(self) -> int | None:
        """The seed under either name, as 64 unsigned bits."""
        seed = self.seed if self.seed is not None else self.seq_seed
        return None if seed is None else seed & ((1 << _SEED_BITS) - 1)
