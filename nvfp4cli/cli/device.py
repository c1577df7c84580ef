"""The --device option."""

import torch

from nvfp4cli.errors import RecipeError, UsageError


def pick(name: str) -> str:
    """Resolve "auto" to cuda where there is a usable GPU, else cpu.

    Raises UsageError for another name, RecipeError for cuda without a GPU.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}: choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError("--device cuda needs an NVIDIA GPU that torch can use: use --device cpu.")
    return name
