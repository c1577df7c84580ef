"""Ctrl-C: a sentence and exit code 130, wherever it falls."""

import os
import signal
from types import FrameType

EXIT_CODE = 128 + signal.SIGINT  # as shells count
MESSAGE = "Interrupted: repeat the command, with --resume if it writes a checkpoint."

_SHOW_CURSOR = b"\x1b[?25h"  # which a progress bar hides


def guard() -> None:
    """Make Ctrl-C safe for the rest of the process; for the console script alone.

    A process that was started with Ctrl-C ignored, as shells do in the background, ignores it on.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def release() -> None:
    """Let Ctrl-C end the process at once and in silence, now that nothing is left to be said."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except into an import.

    torch imports run C++ code that calls Python and aborts the process on any exception. Imports
    leave nothing to clean up.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            cursor = _SHOW_CURSOR if os.isatty(2) else b""
            os.write(2, cursor + f"error: {MESSAGE}\n".encode())
            os._exit(EXIT_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt
