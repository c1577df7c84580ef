"""The boundary of the command `nvfp4`: where an error becomes a sentence and an exit code.

Imports stand inside the functions that guard them, so that Ctrl-C gives no traceback while typer
or torch is being imported.
"""

import errno
import sys

from nvfp4cli.errors import Nvfp4Error

_PIPE_CLOSED = 128 + 13  # as shells count, with the number of SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Run the command line, that of the process by default, and return the exit code.

    2 for a command line that no file could make right, 1 for everything else a user can cause,
    130 for Ctrl-C and 141 where the reader of stdout has gone. A bug of ours keeps its traceback.
    """
    from nvfp4cli.cli import interrupts, streams

    try:
        from nvfp4cli.cli import commands

        code = commands.run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except Nvfp4Error as failure:
        return _fail(str(failure), failure.exit_code)
    except streams.PipeClosedError:
        return _PIPE_CLOSED
    except OSError as failure:
        if failure.errno != errno.ENAMETOOLONG:
            raise
        return _fail(f"The name {_shortened(failure.filename)} is too long: choose another.", 1)
    except KeyboardInterrupt:
        return _fail(interrupts.MESSAGE, interrupts.EXIT_CODE)
    return code


def entry() -> None:
    """The console script."""
    try:
        from nvfp4cli.cli import interrupts, streams

        interrupts.guard()
        streams.guard()
        code = main()
        interrupts.release()
    except Nvfp4Error as failure:  # of the streams
        code = _fail(str(failure), failure.exit_code)
    except KeyboardInterrupt:  # before it is guarded, or while it is being reported
        code = 130
    sys.exit(code)


def _shortened(name: object) -> str:
    text = str(name)
    return text if len(text) <= 80 else f"{text[:60]}..."


def _fail(message: str, code: int) -> int:
    from nvfp4cli.cli import console

    console.error(message)
    return code
