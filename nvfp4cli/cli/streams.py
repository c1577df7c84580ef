"""stdout that fails in words, and stderr that never fails a command."""

import io
import os
import sys
from typing import TextIO

from nvfp4cli.errors import StdoutError


class PipeClosedError(Exception):
    """The reader of stdout has gone. No BrokenPipeError: rich and typer would exit on that."""


def guard() -> None:
    """Replace the standard streams of the process; for the console script alone.

    A result that cannot be written then raises StdoutError, or PipeClosedError where its reader
    has gone; talk that cannot be written is dropped. Characters that an encoding lacks are escaped.

    Raises StdoutError where stdout is closed from the start.
    """
    closed = sys.stdout is None
    # Else the next files that are opened get the streams' numbers, and libraries' talk.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    sys.stdout = _Result(sys.stdout)
    sys.stderr = _Talk(sys.stderr)
    if closed:
        raise StdoutError("stdout is closed: send it to a file, or to /dev/null.")


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - not portable as a path


class _Stream(io.TextIOWrapper):
    """A standard stream that hands a failed write to `failed`, once: then it leads nowhere.

    What could not be written stays in the buffer and would fail again when the process ends.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(
            open(stream.fileno(), "wb", closefd=False),  # noqa: SIM115 - open to the end
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.isatty(),
        )

    def write(self, text: str, /) -> int:
        """As any text stream, but for the errors."""
        try:
            return super().write(text)
        except OSError as error:
            self._divert()
            self.failed(error)
            return len(text)

    def flush(self) -> None:
        """As any text stream, but for the errors."""
        try:
            super().flush()
        except OSError as error:
            self._divert()
            self.failed(error)

    def failed(self, error: OSError) -> None:
        """What a write that the system refused means for the command."""
        raise NotImplementedError

    def _divert(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


class _Talk(_Stream):
    """stderr: nobody reads what cannot be written, and the work goes on."""

    def failed(self, error: OSError) -> None:
        """Do nothing."""


class _Result(_Stream):
    """stdout: a command whose result is lost has failed."""

    def failed(self, error: OSError) -> None:
        """Raise."""
        if isinstance(error, BrokenPipeError):
            raise PipeClosedError from error
        raise StdoutError(
            f"stdout cannot be written ({error.strerror}): send it elsewhere."
        ) from error
