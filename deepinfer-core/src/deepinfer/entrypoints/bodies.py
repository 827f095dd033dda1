"""What an OpenAI body asks, in our words.

Where you are: between ``run-batch`` or the HTTP server and ``SamplingParams``. Every field is
honoured or refused by name; only labels (``user``, ``metadata``), which change no answer, are
passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deepinfer.chat import ChatOptions
from deepinfer.errors import InvalidRequestError
from deepinfer.structured.wishes import format_spec

# Fields of a body that mean what SamplingParams means by the same name.
_SAME: Final = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "seed", "seq_seed", "ignore_eos", "min_tokens",
    "max_tokens", "bad_words", "allowed_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "so_args", "structured_outputs", "prompt_logprobs",
)  # fmt: skip
_OURS: Final = ("model", "max_completion_tokens", "logit_bias", "logprobs", "response_format")
_CHAT: Final = (
    "messages", "top_logprobs", "tools", "tool_choice", "reasoning_effort", "chat_template",
    "chat_template_kwargs",
)  # fmt: skip
_TEXT: Final = ("prompt",)
_LABELS: Final = ("user", "metadata")
# What is done anyway, and so the only values that can be asked for.
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_ONE_OF: Final = (("max_tokens", "max_completion_tokens"), ("so_args", "response_format"))


def check_model(body: Mapping[str, Any], served: tuple[str, ...]) -> None:
    """Refuse a body that asks another model; one that names none asks ours."""
    model = body.get("model")
    if model is not None and model not in served:
        raise InvalidRequestError(
            f"model={model!r} is not served here.",
            setting="model",
            next_step=f"Name {' or '.join(map(repr, served))}, or leave it out.",
        )


def body_params(body: Mapping[str, Any], base: Any, chat: bool) -> Any:
    """A body's sampling parameters over the model's defaults."""
    from deepinfer.sampling_params import SamplingParams

    _check_fields(body, chat)
    given = {k: body[k] for k in _SAME if body.get(k) is not None}
    if body.get("max_completion_tokens") is not None:
        given["max_tokens"] = body["max_completion_tokens"]
    if chat:
        given.setdefault("max_tokens", None)
    if body.get("logit_bias"):
        given["logit_bias"] = {int(k): v for k, v in body["logit_bias"].items()}
    given.update(_logprobs_wish(body, chat), **_format_wish(body.get("response_format")))
    return SamplingParams(**{**base.model_dump(exclude_unset=True), **given})


def chat_options(body: Mapping[str, Any]) -> ChatOptions:
    """What a conversation's body wishes beside its messages and its sampling parameters."""
    return ChatOptions(
        tools=body.get("tools"),
        tool_choice=body.get("tool_choice"),
        response_format=body.get("response_format"),
        format_is_forced=True,  # body_params makes a grammar of it
        reasoning_effort=body.get("reasoning_effort"),
        template_kwargs=body.get("chat_template_kwargs") or {},
    )


def _check_fields(body: Mapping[str, Any], chat: bool) -> None:
    """Refuse what would be passed over in silence."""
    known = (*_SAME, *_OURS, *(_CHAT if chat else _TEXT), *_LABELS, *_FIXED)
    unknown = sorted(k for k in body if k not in known)
    if unknown:
        raise InvalidRequestError(f"Unknown field: {', '.join(unknown)}.", setting=unknown[0])
    for name, possible in _FIXED.items():
        value = body.get(name)
        if value is not None and value not in possible:
            listed = " or ".join(map(repr, possible))
            raise InvalidRequestError(
                f"{name}={value!r} is not possible here.",
                setting=name,
                next_step=f"Give {listed}, or leave it out.",
            )
    for one, two in _ONE_OF:
        if None not in (body.get(one), body.get(two)) and body[one] != body[two]:
            raise InvalidRequestError(
                f"{one} and {two} name the same thing and differ.",
                setting=two,
                next_step="Give one of them.",
            )


def _logprobs_wish(body: Mapping[str, Any], chat: bool) -> dict[str, int]:
    """A number for a text; for a conversation whether, and how many beside the token."""
    wish, most = body.get("logprobs"), body.get("top_logprobs")
    if isinstance(wish, bool) is not chat and wish is not None:
        kind = "true or false" if chat else "a number"
        raise InvalidRequestError(f"logprobs={wish!r}: expected {kind} here.", setting="logprobs")
    if not chat:
        return {} if wish is None else {"logprobs": wish}
    if wish:
        return {"logprobs": 0 if most is None else most}
    if most is not None:
        raise InvalidRequestError(
            f"top_logprobs={most!r} needs logprobs=true.", setting="top_logprobs"
        )
    return {}


def _format_wish(wish: Any) -> dict[str, Any]:
    spec = format_spec(wish)
    return {} if spec is None else {"so_args": spec}
