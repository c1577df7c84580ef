"""What a user can cause. Each message is one sentence that ends with the next step to take.

`cli.app.main` turns any of these into one line on stderr and its exit code; every other exception
is a bug of ours and keeps its traceback.
"""


class Nvfp4Error(Exception):
    """Base of all errors a user can cause."""

    exit_code = 1


class RecipeError(Nvfp4Error):
    """A recipe or an option that does not make sense."""


class UsageError(RecipeError):
    """A command line that cannot work whatever the files hold: an option, a value, a pair."""

    exit_code = 2


class CheckpointError(Nvfp4Error):
    """A checkpoint that cannot be read, or an output that cannot be written."""


class UnsupportedError(Nvfp4Error):
    """A model, a size or a combination that this version does not handle."""


class WeightError(CheckpointError):
    """A tensor whose values cannot be quantised; the run leaves no output."""


class StdoutError(Nvfp4Error):
    """A result that could not be written to stdout."""
