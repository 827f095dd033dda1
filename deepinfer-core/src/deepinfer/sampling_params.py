"""What a caller may ask of one request: :class:`SamplingParams`, :class:`StructuredSpec`.

Field names are those that users of vLLM know; ``seq_seed`` is another spelling of ``seed`` and
``so_args`` of structured output. Everything is checked here, before a request is queued; what
needs the vocabulary or the context length is checked at submission.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepinfer.errors import InvalidRequestError, shown

SCHEMA_TYPES = ("json", "regex", "ebnf", "choice", "json_object", "structural_tag")
_SEED_BITS = 64


class _Frozen(BaseModel):
    """Frozen, closed, and with errors of ours that name the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _explain(type(self).__name__, error) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, which are checked like the first ones."""
        if not update:
            return super().model_copy(deep=deep)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **update})


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise ValueError("expected a list")
    return tuple(value)


def _explain(owner: str, error: ValidationError) -> InvalidRequestError:
    lines, first = [], None
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        first = first or where or None
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: no such parameter")
        else:
            reason = item["msg"].removeprefix("Value error, ")
            given = f"={shown(item['input'])}" if where and item["type"] != "missing" else ""
            lines.append(f"{where}{given}: {reason}" if where else reason)
    return InvalidRequestError(f"{owner}: {'; '.join(lines).rstrip('.')}.", setting=first)


class StructuredSpec(_Frozen):
    """What the text must obey: one type and its rule. Compiled by a grammar plugin."""

    schema_type: Literal["json", "regex", "ebnf", "choice", "json_object", "structural_tag"]
    rule: Any = Field(default=None, alias="schema")


class SamplingParams(_Frozen):
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
        so_args: ``{"schema_type": …, "schema": …}``.
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

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        texts = () if value is None else (value,) if isinstance(value, str) else _tuple(value)
        if any(text == "" for text in texts):
            raise ValueError("an empty text is not allowed")
        return texts

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _no_ids(cls, value: Any) -> Any:
        return () if value is None else _tuple(value)

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
