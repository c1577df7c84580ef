"""transformers in fp64 throughout, so that a fold can be judged by 12 digits instead of 5."""

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Torch(types.ModuleType):
    """torch under whose names for fp32 stands fp64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextmanager
def float64() -> Iterator[None]:
    """Every cast to fp32 in the code of transformers is one to fp64: rotary tables, norms, softmax.

    Models must be constructed, loaded and called within. A module that transformers first imports
    within stays as it is, so whatever a model needs must have been imported before. Not for several
    threads at once: the change is global.
    """
    proxy = _Torch("torch")
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.") and vars(module).get("torch") is torch
    ]
    narrow, default = torch.Tensor.float, torch.get_default_dtype()
    try:
        for module in modules:
            module.torch = proxy  # type: ignore[attr-defined]
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        torch.Tensor.float = narrow  # type: ignore[method-assign]
        for module in modules:
            module.torch = torch  # type: ignore[attr-defined]
