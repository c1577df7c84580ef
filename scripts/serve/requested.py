"""The two sides' agreement: what an engine is asked, and where it leaves its answers.

The answer to a request is `out`.safetensors with the tensor "logits", or `out`.error with what
went wrong. Nothing here needs more than safetensors, since it runs in every engine's environment.
"""

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """The logits of `tokens` from a checkpoint folder, its weights decoded to `dtype`."""

    checkpoint: str
    dtype: str
    tokens: list[int]
    out: str


def ask(file: Path, requests: list[Request]) -> None:
    """Write a file of requests."""
    file.write_text(json.dumps([asdict(request) for request in requests]))


def answer(file: Path, logits: Callable[[Request], Tensor]) -> None:
    """Answer each request of a file with `logits(request)`; one that fails stops none."""
    for values in json.loads(file.read_text()):
        request = Request(**values)
        try:
            save_file({"logits": logits(request)}, f"{request.out}.safetensors")
        except Exception as error:
            traceback.print_exc()
            refuse(Path(request.out), error)


def refuse(out: Path, error: Exception) -> None:
    """Answer with the reason why there are no logits."""
    Path(f"{out}.error").write_text(f"{type(error).__name__}: {error}")


def read(out: Path) -> Tensor:
    """The logits answered, or RuntimeError with the reason there are none."""
    if (found := Path(f"{out}.safetensors")).exists():
        return load_file(found)["logits"]
    if (reason := Path(f"{out}.error")).exists():
        raise RuntimeError(reason.read_text())
    raise RuntimeError("the engine ended without an answer")
