"""``deepinfer run-batch``: OpenAI's batch file format, in and out.

Each line of the input names a ``custom_id``, a ``url`` (``/v1/chat/completions`` or
``/v1/completions``) and a ``body``; each gets one line of output, written when its request ends.
So lines come in order of completion, as OpenAI's batches have them: ``custom_id`` says which is
which. A bad line costs only itself, and Ctrl-C only what has not ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, Final

import click

from deepinfer.cli.options import engine_options, open_async_llm
from deepinfer.cli.reading import TEXT_FILE, as_json
from deepinfer.cli.writing import LineWriter
from deepinfer.entrypoints.bodies import body_params, chat_options, check_model
from deepinfer.errors import (
    ConfigError,
    DeepInferError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
)

_CHAT: Final = "/v1/chat/completions"
_TEXT: Final = "/v1/completions"
_LINE: Final = ("custom_id", "method", "url", "body")
_AHEAD: Final = 4
"""Requests in hand, in units of what the engine runs at once: a long file is not held as pixels."""


@dataclass(slots=True)
class _Job:
    """One line: what it asks, or why it cannot be asked."""

    number: int
    custom_id: Any = None
    chat: bool = False
    prompt: Any = None
    params: Any = None
    error: Exception | None = None
    result: Any = None


@click.command(name="run-batch")
@click.option("-i", "--input", "source", type=TEXT_FILE, required=True)
@click.option("-o", "--output", type=LineWriter, metavar="FILENAME", default="-")
@click.option("--progress/--no-progress", default=None, help="Default: if stderr is a terminal.")
@engine_options
def run_batch(
    source: IO[str], output: LineWriter, progress: bool | None, engine: dict[str, Any]
) -> int:
    """Run every request of a batch file. Each gets one line of output, written when it ends:
    lines come in order of completion, and custom_id says which is which.
    """
    from deepinfer.entrypoints.progress import Bar

    output.refuse([source])
    lines = [(number, line) for number, line in enumerate(source, 1) if line.strip()]
    show = sys.stderr.isatty() if progress is None else progress
    with output, asyncio.Runner() as runner:
        llm = open_async_llm(engine)
        try:
            with Bar(len(lines), "generating", "req", disable=not show) as bar:
                return runner.run(_run_all(llm, lines, output, bar))
        finally:
            llm.close()


async def _run_all(llm: Any, lines: Iterable[tuple[int, str]], output: LineWriter, bar: Any) -> int:
    """The exit code. Requests begin in the order of the lines."""
    name = llm.get_tokenizer().name
    left, most = iter(lines), _AHEAD * llm.assembly.config.max_num_seqs
    running: set[asyncio.Task[_Job]] = set()
    written = failed = 0
    try:
        while True:
            for number, line in islice(left, most - len(running)):
                running.add(asyncio.create_task(_run(llm, line, number)))
            if not running:
                return 1 if failed else 0
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for job in sorted((task.result() for task in done), key=lambda job: job.number):
                output.write(json.dumps(_line(job, name), ensure_ascii=False))
                written, failed = written + 1, failed + (job.error is not None)
                bar.show(written)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _run(llm: Any, line: str, number: int) -> _Job:
    """One line, from its text to its answer."""
    job = _job(llm, line, number)
    if job.error is not None:
        return job
    try:
        async with contextlib.aclosing(llm.generate(job.prompt, job.params)) as outputs:
            async for output in outputs:
                job.result = output
    except (EngineDeadError, EngineClosedError):
        raise
    except Exception as why:  # its own, whatever it is
        job.error = why
    return job


def _job(llm: Any, line: str, number: int) -> _Job:
    job = _Job(number)
    try:
        asked = _parsed(line, number)
        job.custom_id = asked.get("custom_id")
        job.chat, body = _what(asked, number)
        check_model(body, _names(llm))
        params = body_params(body, llm.get_default_sampling_params(), job.chat)
        job.params = params.model_copy(update={"output_kind": "final_only"})
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


def _line(job: _Job, model: str) -> dict[str, Any]:
    number = job.number
    if job.error is not None:
        status = 400 if isinstance(job.error, InvalidRequestError | ConfigError) else 500
        body: dict[str, Any] = {"error": {"message": str(job.error), "type": _code(job.error)}}
    else:
        status, body = 200, _body(job, model)
    return {
        "id": f"batch_req_{number}",
        "custom_id": job.custom_id,
        "response": {"status_code": status, "request_id": f"req_{number}", "body": body},
        "error": None if job.error is None else body["error"],
    }


def _code(error: Exception) -> str:
    return error.code if isinstance(error, DeepInferError) else "internal"


def _body(job: _Job, model: str) -> dict[str, Any]:
    result = job.result
    written = sum(len(out.token_ids) for out in result.outputs)
    prompt = len(result.prompt_token_ids)
    asked = result.prompt_logprobs
    extra = {} if asked is None else {"prompt_logprobs": [_candidates(c) for c in asked]}
    return {
        "id": f"{'chatcmpl' if job.chat else 'cmpl'}-{job.number}",
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
