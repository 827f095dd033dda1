"""``deepinfer chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from deepinfer.cli.options import (
    NO_LIMIT,
    engine_options,
    open_async_llm,
    sampling_options,
    sampling_params,
)
from deepinfer.cli.reading import as_text, standard_input

_HELP = "/exit ends, /reset forgets the conversation, /help shows this. Ctrl-C stops an answer."


@click.command()
@click.option("--system", help="A system message.")
@sampling_options
@engine_options
def chat(system: str | None, sampling: dict[str, Any], engine: dict[str, Any]) -> None:
    """Talk with a model. Lines come from the terminal or from standard input."""
    sampling.setdefault("max_tokens", NO_LIMIT)
    sampling_params(sampling)  # refuse nonsense before a model is loaded
    with asyncio.Runner() as runner:
        llm = open_async_llm(engine)
        try:
            params = sampling_params(sampling, llm.get_default_sampling_params())
            params = params.model_copy(update={"output_kind": "delta"})
            _talk(runner, llm, params, system)
        finally:
            llm.close()


def _talk(runner: asyncio.Runner, llm: Any, params: Any, system: str | None) -> None:
    opening = [] if system is None else [{"role": "system", "content": system}]
    talk = list(opening)
    if sys.stdin.isatty():
        click.secho(_HELP, dim=True)
    for line in _lines():
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            talk = list(opening)
        elif line.startswith("/"):
            click.secho(_HELP, dim=True)
        elif line:
            talk.append({"role": "user", "content": line})
            talk.append({"role": "assistant", "content": _answer(runner, llm, params, talk)})


def _lines() -> Iterator[str]:
    """What the user types; Ctrl-D ends, Ctrl-C only empties the line."""
    read = _terminal() if sys.stdin.isatty() else _piped()
    while True:
        try:
            yield as_text(read(), "this line").strip()
        except KeyboardInterrupt:
            click.secho("\n(/exit ends)", dim=True)
        except UnicodeDecodeError as why:
            click.secho(f"(that was no {why.encoding} text)", dim=True)
        except EOFError:
            return


def _terminal() -> Callable[[], str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    return lambda: input("> ")


def _piped() -> Callable[[], str]:
    source = standard_input()

    def read() -> str:
        line = source.readline()
        if not line:
            raise EOFError
        return line

    return read


def _answer(runner: asyncio.Runner, llm: Any, params: Any, talk: list[Any]) -> str:
    """Stream one answer; Ctrl-C keeps what was said so far."""
    said: list[str] = []
    try:
        runner.run(_stream(llm, params, talk, said))
    except KeyboardInterrupt:
        click.secho(" (stopped)", dim=True, nl=False)
    click.echo()
    return "".join(said)


async def _stream(llm: Any, params: Any, talk: list[Any], said: list[str]) -> None:
    stream = llm.chat(talk, params)
    try:
        async for output in stream:
            for out in output.outputs[:1]:
                said.append(_show(out))
                sys.stdout.flush()
    finally:
        await stream.aclose()


def _show(out: Any) -> str:
    """Print what came; give what belongs into the conversation, which reasoning does not."""
    if out.message is None:
        click.echo(out.text, nl=False)
        return str(out.text)
    if out.message.reasoning_content:
        click.secho(out.message.reasoning_content, dim=True, nl=False)
    if out.message.content:
        click.echo(out.message.content, nl=False)
    return out.message.content or ""
