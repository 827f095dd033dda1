"""The command line: ``deepinfer`` or ``python -m deepinfer``.

Where you are: the door for people. Each command lives in its own file under ``cli`` and is
imported when it is called, so that ``--help`` stays quick. Only this program configures logging;
the library never does.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import click

_COMMANDS: Final = {
    "generate": ("deepinfer.cli.generate:generate", "Continue prompts: arguments, files, stdin."),
    "chat": ("deepinfer.cli.chat:chat", "Talk with a model in the terminal."),
    "serve": ("deepinfer.cli.serve:serve", "Serve a model over HTTP."),
    "run-batch": ("deepinfer.cli.run_batch:run_batch", "Run an OpenAI batch file."),
    "recipe": ("deepinfer.cli.recipe:recipe", "Entities, SQL, classification, documents to data."),
    "bench": ("deepinfer.cli.bench:bench", "Measure latency, throughput and start-up."),
    "verify": ("deepinfer.cli.verify:verify", "Check promises: determinism, speculation."),
    "speculative": ("deepinfer.cli.speculative:speculative", "Calibrate a draft's confidences."),
    "plugins": ("deepinfer.cli.plugins:plugins", "List, diagnose and create plugins."),
    "doctor": ("deepinfer.cli.doctor:doctor", "Diagnose this installation."),
    "config": ("deepinfer.cli.config:config", "Show settings; estimate memory."),
    "make-tiny": ("deepinfer.cli.make_tiny:make_tiny", "Write a tiny random checkpoint."),
}


class _Lazy(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in _COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deepinfer-core", prog_name="deepinfer")
@click.option("-v", "--verbose", count=True, help="Log what happens; -vv logs every step.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, verbose: int, debug: bool) -> None:
    """DeepInfer: run language models."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(levelname).1s %(name)s: %(message)s")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    code = run(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # full or closed, which was said; let nothing try it again
            code = code or 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def run(argv: list[str]) -> int:
    """0 done, 1 failed, 2 the input was wrong, 130 interrupted."""
    from deepinfer import errors

    try:
        code = cli.main(args=argv, prog_name="deepinfer", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as why:
        why.show()
        return why.exit_code
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return 130
    except errors.DeepInferError as why:
        if "--debug" in argv:
            traceback.print_exc()
        click.echo(f"error: {why.message}", err=True)
        if why.next_step:
            click.echo(why.next_step, err=True)
        bad_input = (errors.ConfigError, errors.InvalidRequestError, errors.ModelNotFoundError)
        return 2 if isinstance(why, bad_input) else 1
    except OSError as why:  # a full disk behind what a command prints
        if "--debug" in argv:
            traceback.print_exc()
        click.echo(f"error: {why.filename or 'output'}: {why.strerror or why}.", err=True)
        return 1


if __name__ == "__main__":
    main()
