"""``deepinfer generate``: prompts in, text or jsonl out."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Final

import click

from deepinfer.cli.options import engine_options, open_llm, sampling_options, sampling_params
from deepinfer.cli.reading import TEXT_FILE, as_json, as_text, standard_input
from deepinfer.cli.writing import LineWriter
from deepinfer.errors import InvalidRequestError

_MAX_TOKENS: Final = 128
"""Where the command line does not say: the library's 16 cuts most sentences."""
_FIELDS: Final = ("messages", "prompt_token_ids", "prompt")


@click.command()
@click.argument("prompts", nargs=-1)
@click.option(
    "-f",
    "--file",
    "files",
    type=TEXT_FILE,
    multiple=True,
    help="Prompts from a file: a line each, or jsonl with prompt, prompt_token_ids or messages.",
)
@click.option("--chat", is_flag=True, help="A prompt is a user's message to a chat model.")
@click.option("--system", help="A system message, with --chat.")
@click.option("--json", "as_json", is_flag=True, help="Write jsonl.")
@click.option("-o", "--output", type=LineWriter, metavar="FILENAME", help="Write jsonl there.")
@click.option("--progress/--no-progress", default=None, help="Default: if stderr is a terminal.")
@sampling_options
@engine_options
def generate(
    prompts: tuple[str, ...],
    files: tuple[IO[str], ...],
    chat: bool,
    system: str | None,
    as_json: bool,
    output: LineWriter | None,
    progress: bool | None,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> int:
    """Continue PROMPTS, the lines of --file, or standard input as one text."""
    writer = output or (LineWriter("-") if as_json else None)
    if writer is not None:
        writer.refuse(files)
    asked = list(_asked(prompts, files, chat))
    if not asked:
        raise click.UsageError("No prompt: give arguments, --file, or text on standard input.")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat.")
    sampling = {"max_tokens": _MAX_TOKENS, **sampling}
    sampling_params(sampling)  # refuse nonsense before a model is loaded
    with writer or contextlib.nullcontext():
        with open_llm(engine) as llm:
            params = sampling_params(sampling, llm.get_default_sampling_params())
            show = sys.stderr.isatty() if progress is None else progress
            results = _run(llm, [_prompt(llm, p, chat, system) for p in asked], params, show)
        if writer is None:
            _print(results)
        else:
            for prompt, result in zip(asked, results, strict=True):
                writer.write(json.dumps(record(prompt, result), ensure_ascii=False))
    failed = [r for r in results if r.error is not None]
    for result in failed:
        click.echo(f"error: {result.error}", err=True)
    return 1 if failed else 0


def _asked(prompts: Iterable[str], files: Iterable[IO[str]], chat: bool) -> Iterator[Any]:
    """Texts, id lists or lists of messages."""
    given = False
    for number, prompt in enumerate(prompts, 1):
        given = True
        if not prompt and not chat:  # a user may say nothing; a text to go on with must begin
            raise InvalidRequestError(
                f"Prompt {number} is empty: there is nothing to continue.", setting="prompts"
            )
        yield as_text(prompt, f"prompt {number}")
    for file in files:
        given = True
        yield from _lines(file)
    if not given and not sys.stdin.isatty():
        text = as_text(standard_input().read(), "standard input")
        if text.strip():
            yield text.rstrip("\n")


def _lines(file: IO[str]) -> Iterator[Any]:
    jsonl = file.name.endswith((".jsonl", ".json"))
    for number, line in enumerate(file, 1):
        where = f"{file.name}, line {number}"
        if line.strip():
            yield _of_json(line, where) if jsonl else as_text(line, where).rstrip("\n")


def _of_json(line: str, where: str) -> Any:
    value = as_json(line, where)
    if isinstance(value, str | list):
        return value
    given = value if isinstance(value, dict) else {}
    for key in _FIELDS:
        if key in given:
            _check_alone(key, given, where)
            return {key: given[key]} if key == "messages" else given[key]
    raise InvalidRequestError(f"{where} has none of prompt, prompt_token_ids and messages.")


def _check_alone(key: str, given: Mapping[str, Any], where: str) -> None:
    """Refuse what would be passed over in silence. A text may stand beside its ids."""
    fields = {key} if key == "messages" else {"prompt", "prompt_token_ids"}
    beside = sorted({*given} - fields)
    if beside:
        raise InvalidRequestError(
            f"{where} has {', '.join(beside)} beside {key}.",
            setting=beside[0],
            next_step="Parameters are options of the command; run-batch takes them by the line.",
        )


def _prompt(llm: Any, asked: Any, chat: bool, system: str | None) -> Any:
    if isinstance(asked, dict):
        messages = asked["messages"]
    elif chat and isinstance(asked, str):
        messages = [{"role": "user", "content": asked}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
    else:
        return asked
    return llm.assembly.render_chat(messages)


def _run(llm: Any, prompts: list[Any], params: Any, show: bool) -> list[Any]:
    results: list[Any] = llm.generate(prompts, params, use_tqdm=show and len(prompts) > 1)
    return results


def record(prompt: Any, result: Any) -> dict[str, Any]:
    """One line of jsonl."""
    line: dict[str, Any] = {"request_id": result.request_id, "prompt": prompt}
    line["outputs"] = [
        {
            "index": out.index,
            "text": out.text,
            "token_ids": list(out.token_ids),
            "finish_reason": out.finish_reason,
            "stop_reason": out.stop_reason,
            **({} if out.message is None else {"message": out.message.as_dict()}),
            **({} if out.logprobs is None else {"logprobs": _logprobs(out.logprobs)}),
        }
        for out in result.outputs
    ]
    if result.error is not None:
        line["error"] = str(result.error)
    return line


def _logprobs(logprobs: Iterable[Any]) -> list[dict[str, float]]:
    return [{str(t): lp.logprob for t, lp in candidates.items()} for candidates in logprobs]


def _print(results: list[Any]) -> None:
    several = sum(len(result.outputs) for result in results) > 1
    for i, result in enumerate(results):
        for out in result.outputs:
            if several:
                click.secho(f"--- {i + 1}.{out.index + 1}", dim=True)
            click.echo(out.text)
