"""The --device option."""

import torch

from nvfp4cli.errors import RecipeError


def pick(name: str) -> str:
    """Resolve "auto" to cuda where there is a usable GPU, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise RecipeError(f"--device is {name!r}: choose auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError("--device cuda needs an NVIDIA GPU that torch can use: use --device cpu.")
    return name
