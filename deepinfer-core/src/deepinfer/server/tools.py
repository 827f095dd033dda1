"""What the dialects share: prompts, usage, log-probabilities; and the small routes' answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from deepinfer import __version__
from deepinfer.entrypoints.bodies import chat_options
from deepinfer.errors import InvalidRequestError
from deepinfer.server.schemas import Body, ChatMessage, Text, Token, Tool
from deepinfer.server.talk import plain_message

if TYPE_CHECKING:
    from deepinfer.api.plan import TokenLogprob
    from deepinfer.entrypoints.inputs import Prompt
    from deepinfer.entrypoints.outputs import CompletionOutput
    from deepinfer.server.service import Run, Service


class TokenizeBody(Body):
    """``POST /tokenize``: a text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[Token]


class AbortBody(Body):
    """``POST /abort_requests``: the ids that answers carry, or all of them."""

    request_ids: list[str] | None = None
    abort_all: bool | None = None


def as_prompts(prompt: Any) -> list[Prompt]:
    """OpenAI's ``prompt``: one text, several, one list of ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", setting="prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def usage(run: Run) -> dict[str, Any]:
    """Tokens of a request, as OpenAI counts them."""
    used = run.usage
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.output,
        "total_tokens": used.prompt + used.output,
        "prompt_tokens_details": {"cached_tokens": used.cached},
    }


def id_logprobs(out: CompletionOutput) -> list[dict[str, Any]]:
    """By id: of the token itself, and of the candidates."""
    assert out.logprobs is not None
    return [
        {
            "token_id": token,
            "logprob": found[token].logprob,
            "top": {str(i): lp.logprob for i, lp in found.items()},
        }
        for token, found in zip(out.token_ids, out.logprobs, strict=True)
    ]


def text_logprobs(out: CompletionOutput, most: int, start: int) -> tuple[dict[str, Any], int]:
    """OpenAI's older form; offsets count from ``start``. Gives the next start too."""
    assert out.logprobs is not None
    tokens, chosen, tops, offsets = [], [], [], []
    for token, found in zip(out.token_ids, out.logprobs, strict=True):
        text = found[token].decoded_token or ""
        tokens.append(text)
        chosen.append(found[token].logprob)
        tops.append(
            {lp.decoded_token or f"token_id:{i}": lp.logprob for i, lp in best(found, most)}
        )
        offsets.append(start)
        start += len(text)
    lists = {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops}
    return {**lists, "text_offset": offsets}, start


def chat_logprobs(out: CompletionOutput, most: int, tokenizer: Any) -> list[dict[str, Any]]:
    """OpenAI's newer form. ``bytes`` are the token's own, whole characters or not."""
    assert out.logprobs is not None

    def entry(token: int, lp: TokenLogprob) -> dict[str, Any]:
        data = list(tokenizer.token_bytes(token))
        return {"token": lp.decoded_token or "", "logprob": lp.logprob, "bytes": data}

    return [
        {
            **entry(token, found[token]),
            "top_logprobs": [entry(i, lp) for i, lp in best(found, most)],
        }
        for token, found in zip(out.token_ids, out.logprobs, strict=True)
    ]


def best(found: Mapping[int, TokenLogprob], most: int) -> list[tuple[int, TokenLogprob]]:
    """The best candidates; the token itself stands beside them when it is none."""
    ranked = sorted(found.items(), key=lambda pair: pair[1].rank)
    return [pair for pair in ranked if pair[1].rank <= most]


def models(service: Service) -> dict[str, Any]:
    """``GET /v1/models``: one model under all its names."""
    facts = service.llm.assembly.facts
    about = {"object": "model", "created": int(time.time()), "owned_by": "deepinfer"}
    root = service.names[0]
    return {
        "object": "list",
        "data": [
            {"id": name, **about, "root": root, "max_model_len": facts.max_model_len}
            for name in service.names
        ],
    }


def version() -> dict[str, Any]:
    """``GET /version``."""
    return {"version": __version__}


def tokenize(body: dict[str, Any], service: Service) -> dict[str, Any]:
    """``POST /tokenize``. On a thread."""
    wish = TokenizeBody.read(body)
    service.check_model(wish.model)
    if (wish.prompt is None) is (wish.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", setting="prompt")
    tokenizer, assembly = _tokenizer(service), service.llm.assembly
    if wish.prompt is not None:
        for name in ("tools", "chat_template_kwargs"):
            if getattr(wish, name) is not None:
                raise InvalidRequestError(f"{name} needs messages.", setting=name)
        special = wish.add_special_tokens is not False
        ids: Sequence[int] = tokenizer.encode(wish.prompt, add_special_tokens=special)
    else:
        if wish.add_special_tokens is not None:
            raise InvalidRequestError(
                "add_special_tokens belongs to a prompt; a chat format has its own.",
                setting="add_special_tokens",
            )
        said = wish.said()
        talk = [plain_message(m) for m in said["messages"]]
        ids = assembly.render_chat(talk, chat_options(said))["prompt_token_ids"]
    found = {"count": len(ids), "max_model_len": assembly.facts.max_model_len, "tokens": list(ids)}
    if wish.return_token_strs:
        found["token_strs"] = [tokenizer.id_to_token(i) for i in ids]
    return found


def detokenize(body: dict[str, Any], service: Service) -> dict[str, Any]:
    """``POST /detokenize``. On a thread."""
    wish = DetokenizeBody.read(body)
    service.check_model(wish.model)
    size = service.llm.assembly.facts.vocab_size
    for index, token in enumerate(wish.tokens):
        if token >= size:
            raise InvalidRequestError(
                f"tokens[{index}]={token}: the vocabulary has {size} ids.",
                setting=f"tokens[{index}]",
            )
    return {"prompt": _tokenizer(service).decode(wish.tokens, skip_special_tokens=False)}


def _tokenizer(service: Service) -> Any:
    tokenizer = service.llm.assembly.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("This engine has no tokenizer; prompts are token ids.")
    return tokenizer
