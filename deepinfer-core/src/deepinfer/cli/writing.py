"""Where results go: lines of a file or of standard output, each out of our hands once written.

Where you are: behind ``generate``, ``run-batch`` and ``bench``. A place that cannot be written to
is refused before a model is loaded, and its old content goes only when the first line comes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import IO, Final

import click

from deepinfer.errors import DeepInferError

_STANDARD: Final = "-"


class OutputError(DeepInferError):
    """Results cannot be written: a full disk, a closed pipe."""

    code = "output"


class LineWriter:
    """Writes lines; a context manager, which opens the place and closes it. An option's ``type``.

    Args:
        name: a file's name, ``-`` for standard output.

    Raises:
        click.BadParameter: on entry, that it cannot be opened.
        OutputError: a line, or the end, could not be written.
    """

    def __init__(self, name: str) -> None:
        self._standard = name == _STANDARD
        self._name = "standard output" if self._standard else name
        self._file: IO[str] | None = None
        self._fresh = True

    def refuse(self, sources: Iterable[IO[str]]) -> None:
        """A wrong option: writing where these are read from would lose them."""
        for source in sources:
            with contextlib.suppress(OSError, ValueError):  # no file of the system, or not there
                if not self._standard and os.path.samestat(
                    os.stat(self._name), os.fstat(source.fileno())
                ):
                    raise click.BadParameter(
                        f"{self._name!r} is read from too.", param_hint="--output"
                    )

    def write(self, line: str) -> None:
        """One line, flushed."""
        try:
            file = self._begin()
            file.write(line + "\n")
            file.flush()
        except (OSError, ValueError) as why:  # ValueError: it is closed already
            if self._file is not None:  # what its buffer holds can go nowhere
                with contextlib.suppress(OSError):
                    self._file.close()
            raise self._failed(why) from why

    def _begin(self) -> IO[str]:
        if self._file is None:
            return sys.stdout
        if self._fresh:
            self._fresh = False
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
        return self._file

    def _failed(self, why: Exception) -> OutputError:
        reason = why.strerror if isinstance(why, OSError) else str(why)
        return OutputError(f"{self._name} cannot be written: {reason}.", setting="output")

    def __enter__(self) -> LineWriter:
        if not self._standard:
            try:  # to append: what is there stays until there is something to write
                self._file = open(self._name, "a", encoding="utf-8")
            except OSError as why:
                raise click.BadParameter(
                    f"{self._name!r} cannot be written: {why.strerror}.", param_hint="--output"
                ) from why
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        try:
            if kind is None:
                self._begin()  # nothing was written: an empty file says so
            self._file.close()
        except OSError as why:
            raise self._failed(why) from why
