"""``deepinfer run-batch``: OpenAI's batch file format, in and out.

Each line of the input names a ``custom_id``, a ``url`` (``/v1/chat/completions`` or
``/v1/completions``) and a ``body``; each gets one line of output, in order. A bad line costs only
itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

import click

from deepinfer.cli.options import engine_options, open_llm
from deepinfer.cli.reading import TEXT_FILE, as_json
from deepinfer.entrypoints.bodies import body_params, chat_options, check_model
from deepinfer.errors import ConfigError, DeepInferError, InvalidRequestError

_CHAT: Final = "/v1/chat/completions"
_TEXT: Final = "/v1/completions"
_LINE: Final = ("custom_id", "method", "url", "body")


@dataclass(slots=True)
class _Job:
    """One line: what it asks, or why it cannot be asked."""

    custom_id: Any
    chat: bool = False
    prompt: Any = None
    params: Any = None
    error: DeepInferError | None = None
    result: Any = None


@click.command(name="run-batch")
@click.option("-i", "--input", "source", type=TEXT_FILE, required=True)
@click.option("-o", "--output", type=click.File("w", encoding="utf-8"), default="-")
@click.option("--progress/--no-progress", default=None, help="Default: if stderr is a terminal.")
@engine_options
def run_batch(
    source: IO[str], output: IO[str], progress: bool | None, engine: dict[str, Any]
) -> int:
    """Run every request of a batch file; one line of output for each line of input."""
    lines = [line for line in source if line.strip()]
    with open_llm(engine) as llm:
        jobs = [_job(llm, line, number) for number, line in enumerate(lines, 1)]
        ready = [job for job in jobs if job.error is None]
        show = sys.stderr.isatty() if progress is None else progress
        if ready:
            prompts = [job.prompt for job in ready]
            results = _generate(llm, prompts, [job.params for job in ready], show)
            for job, result in zip(ready, results, strict=True):
                job.result, job.error = result, result.error
        name = llm.get_tokenizer().name
    for number, job in enumerate(jobs, 1):
        output.write(json.dumps(_line(job, number, name), ensure_ascii=False) + "\n")
    return 0 if all(job.error is None for job in jobs) else 1


def _generate(llm: Any, prompts: list[Any], params: list[Any], show: bool) -> list[Any]:
    from deepinfer.entrypoints.outputs import failed_output

    try:
        results: list[Any] = llm.generate(prompts, params, use_tqdm=show)
        return results
    except (InvalidRequestError, ConfigError) as why:  # the only one
        return [failed_output("", None, (), why)]


def _job(llm: Any, line: str, number: int) -> _Job:
    job = _Job(None)
    try:
        asked = _parsed(line, number)
        job.custom_id = asked.get("custom_id")
        job.chat, body = _what(asked, number)
        check_model(body, _names(llm))
        job.params = body_params(body, llm.get_default_sampling_params(), job.chat)
        job.prompt = _prompt(llm, body) if job.chat else body.get("prompt")
        if job.prompt is None:
            raise InvalidRequestError("The body has no prompt.", setting="prompt")
    except DeepInferError as why:
        job.error = why
    except Exception as why:
        # A field of another type than OpenAI's: whatever it breaks, it breaks its own line only.
        job.error = InvalidRequestError(f"line {number} has a field of the wrong shape: {why!r}.")
    return job


def _parsed(line: str, number: int) -> dict[str, Any]:
    asked = as_json(line, f"line {number}")
    return asked if isinstance(asked, dict) else {}


def _what(asked: Mapping[str, Any], number: int) -> tuple[bool, dict[str, Any]]:
    """Whether it is a conversation, and the body."""
    unknown = sorted(k for k in asked if k not in _LINE)
    if unknown:
        raise InvalidRequestError(
            f"line {number} has an unknown field beside its body: {', '.join(unknown)}.",
            setting=unknown[0],
        )
    url, body = asked.get("url"), asked.get("body")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"line {number} has no body.", setting="body")
    if asked.get("method", "POST") != "POST" or url not in (_CHAT, _TEXT):
        raise InvalidRequestError(
            f"{asked.get('method')} {url} is not served; POST {_CHAT} and {_TEXT} are.",
            setting="url",
        )
    return url == _CHAT, body


def _names(llm: Any) -> tuple[str, ...]:
    """What a body may call the model: its own name, and what ``--model`` says."""
    return tuple(dict.fromkeys((llm.get_tokenizer().name, llm.assembly.config.model)))


def _prompt(llm: Any, body: Mapping[str, Any]) -> Any:
    options = chat_options(body)
    return llm.assembly.render_chat(body.get("messages"), options, body.get("chat_template"))


def _line(job: _Job, number: int, model: str) -> dict[str, Any]:
    if job.error is not None:
        status = 400 if isinstance(job.error, InvalidRequestError | ConfigError) else 500
        body: dict[str, Any] = {"error": {"message": str(job.error), "type": _code(job.error)}}
    else:
        status, body = 200, _body(job, model, number)
    return {
        "id": f"batch_req_{number}",
        "custom_id": job.custom_id,
        "response": {"status_code": status, "request_id": f"req_{number}", "body": body},
        "error": None if job.error is None else body["error"],
    }


def _code(error: Exception) -> str:
    return error.code if isinstance(error, DeepInferError) else "internal"


def _body(job: _Job, model: str, number: int) -> dict[str, Any]:
    result = job.result
    written = sum(len(out.token_ids) for out in result.outputs)
    prompt = len(result.prompt_token_ids)
    asked = result.prompt_logprobs
    extra = {} if asked is None else {"prompt_logprobs": [_candidates(c) for c in asked]}
    return {
        "id": f"{'chatcmpl' if job.chat else 'cmpl'}-{number}",
        "object": "chat.completion" if job.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": list(_choices(job)),
        **extra,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        },
    }


def _choices(job: _Job) -> Iterator[dict[str, Any]]:
    for out in job.result.outputs:
        choice: dict[str, Any] = {"index": out.index, "finish_reason": out.finish_reason}
        if job.chat:
            parts = {"role": "assistant", "content": out.text}
            choice["message"] = parts if out.message is None else out.message.as_dict()
        else:
            choice["text"] = out.text
        if out.logprobs is not None:
            choice["logprobs"] = {"content": [_token(t, lps) for t, lps in _pairs(out)]}
        yield choice


def _pairs(out: Any) -> Iterator[tuple[int, dict[int, Any]]]:
    yield from zip(out.token_ids, out.logprobs, strict=True)


def _token(token: int, logprobs: Mapping[int, Any]) -> dict[str, Any]:
    ranked = sorted(logprobs.values(), key=lambda lp: lp.rank)
    return {
        "token": logprobs[token].decoded_token,
        "logprob": logprobs[token].logprob,
        "top_logprobs": [{"token": lp.decoded_token, "logprob": lp.logprob} for lp in ranked],
    }


def _candidates(logprobs: Mapping[int, Any] | None) -> dict[str, Any] | None:
    """Of a prompt's token; its first has none."""
    if logprobs is None:
        return None
    return {
        str(token): {"logprob": lp.logprob, "rank": lp.rank, "decoded_token": lp.decoded_token}
        for token, lp in logprobs.items()
    }
