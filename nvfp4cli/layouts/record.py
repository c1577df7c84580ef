"""What passes between the layouts and the rest of the tool."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.formats.nvfp4 import GlobalScale, Quantized

Read = Callable[[str], Tensor]
Shape = tuple[int, int]  # (out_features, in_features)


@dataclass(frozen=True)
class Stored:
    """A quantised module as a layout stores it.

    input_scale: the static activation scale of W4A4, None in weight-only files.
    """

    weight: Quantized
    input_scale: GlobalScale | None = None


@dataclass(frozen=True)
class Contents:
    """What a checkpoint will hold, for the writing of its configuration.

    quantized: modules in NVFP4. kept: linear modules in the source dtype. activations: True where
    input scales are stored.
    """

    quantized: Collection[str]
    kept: Collection[str]
    activations: bool


class Layout(Protocol):
    """One on-disk convention, implemented by a module of this package."""

    NAME: str
    SWIZZLED: bool
    SINGLE_FILE: bool  # its consumer takes one file only
    INPUT_SCALES: bool  # it can hold static activation scales
    SERVE: str  # what to do with the output {out}

    def outputs(self, module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
        """The tensors that store a quantised weight."""

    def export(self, module: str, stored: Stored) -> dict[str, Tensor]:
        """Those tensors with their data."""

    def modules(self, names: Collection[str]) -> list[str]:
        """The quantised modules among the tensor names of a checkpoint."""

    def shape(self, module: str, checkpoint: Checkpoint) -> Shape:
        """The weight's shape, from the headers alone."""

    def load(self, module: str, shape: Shape, read: Read, activations: bool) -> Stored:
        """Read a module back into the canonical record; `activations`: with its input scale."""

    def header_metadata(
        self, quantized: Mapping[str, Shape], plain: Collection[str], dtype: torch.dtype
    ) -> dict[str, str]:
        """Entries for a file's __metadata__: its quantised modules and its other tensors."""

    def quantization_config(self, contents: Contents) -> dict[str, Any] | None:
        """The value of config.json's quantization_config."""

    def extra_files(self, contents: Contents) -> dict[str, dict[str, Any]]:
        """Further JSON files, name -> content."""


def scalar(value: float, shape: tuple[int, ...]) -> Tensor:
    """A one-element fp32 tensor."""
    return torch.full(shape, value, dtype=torch.float32)
