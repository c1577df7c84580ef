"""What a user can cause. Each message is one sentence that ends with the next step to take.

`cli.app.main` turns any of these into one line on stderr and exit code 1; every other exception is
a bug of ours and keeps its traceback.
"""


class Nvfp4Error(Exception):
    """Base of all errors a user can cause."""


class RecipeError(Nvfp4Error):
    """A recipe or an option that does not make sense."""


class CheckpointError(Nvfp4Error):
    """A checkpoint that cannot be read, or an output that cannot be written."""


class UnsupportedError(Nvfp4Error):
    """A model, a size or a combination that this version does not handle."""


class WeightError(CheckpointError):
    """A tensor whose values cannot be quantised; the run leaves no output."""
