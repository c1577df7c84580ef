"""What passes between the layouts and the rest of the tool."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.formats import fp8
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.formats.nvfp4 import GlobalScale, Quantized

Read = Callable[[str], Tensor]
Shape = tuple[int, int]  # (out_features, in_features)


@dataclass(frozen=True)
class Stored:
    """A quantised module as a layout stores it.

    input_scale: the static activation scale of W4A4, None in weight-only files. branch: of
    SVDQuant, which adds to the weight's outputs and reads the inputs before they are rounded.
    """

    weight: Quantized
    input_scale: GlobalScale | None = None
    branch: LowRank | None = None

    def rows(self, start: int, stop: int) -> "Stored":
        """The module of outputs [start, stop)."""
        weight = self.weight
        codes, scales = weight.packed[start:stop], weight.block_scale[start:stop]
        added = self.branch.rows(start, stop) if self.branch else None
        return Stored(Quantized(codes, scales, weight.global_scale), self.input_scale, added)

    def whole(self, dequantized: Tensor) -> Tensor:
        """fp32 [N, K], the weight with its branch; dequantized: without it."""
        return dequantized if self.branch is None else dequantized + self.branch.product()


@dataclass(frozen=True)
class StoredFp8:
    """A module in FP8, of a mixed checkpoint.

    values: float8_e4m3fn [out, in]. scale: the fp32 multiplier of all of them. input_scale: the
    static one of activations, None in weight-only files.
    """

    values: Tensor
    scale: float
    input_scale: float | None = None


@dataclass(frozen=True)
class CacheScales:
    """Of an attention module: what keys and values in the cache are multiplied by.

    In NVFP4 that is the global scale; block scales are found while the model runs.
    """

    key: float
    value: float

    @classmethod
    def from_amax(cls, key: float, value: float, form: str = "fp8") -> "CacheScales":
        """amax / 448 each, in NVFP4 amax / 2688.

        1 where nothing but zeros was seen, or is below what fp32 divides by.
        """
        if form == "nvfp4":
            return cls(*(GlobalScale.from_amax(amax).multiplier for amax in (key, value)))
        return cls(fp8.scale_of(key), fp8.scale_of(value))


@dataclass(frozen=True)
class Contents:
    """What a checkpoint will hold, for the writing of its configuration.

    quantized: modules in NVFP4. kept: linear modules in the source dtype. activations: they are
    quantised too, under scales that are stored or, where the layout holds none, dynamic. caches:
    the format of KV caches, None for the model's dtype. fp8: modules in FP8. rank: of the low-rank
    branches of SVDQuant, None without.
    """

    quantized: Collection[str]
    kept: Collection[str]
    activations: bool
    caches: str | None = None
    fp8: Collection[str] = ()
    rank: int | None = None


class Layout(Protocol):
    """One on-disk convention, implemented by a module of this package."""

    NAME: str
    SWIZZLED: bool
    SINGLE_FILE: bool  # its consumer takes one file only
    INPUT_SCALES: bool  # it can hold static activation scales
    CACHES: tuple[str, ...]  # formats of KV caches that it can hold scales of
    FP8_SCHEMES: tuple[str, ...]  # of a recipe, in which other modules may be in FP8
    BRANCHES: bool  # it can hold low-rank branches
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

    def input_scale(self, stored: float) -> GlobalScale:
        """The activation scale that a stored number stands for."""

    def fp8_outputs(self, module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
        """The tensors that store a module in FP8, the values first."""

    def fp8_export(self, module: str, stored: StoredFp8) -> dict[str, Tensor]:
        """Those tensors with their data."""

    def cache_outputs(self, attention: str) -> tuple[Output, ...]:
        """The tensors that store the cache scales of an attention module, keys first."""

    def cache_export(self, attention: str, scales: CacheScales) -> dict[str, Tensor]:
        """Those tensors with their data."""

    def header_metadata(
        self,
        quantized: Mapping[str, Shape],
        plain: Collection[str],
        dtype: torch.dtype,
        activations: bool = False,
    ) -> dict[str, str]:
        """Entries for a file's __metadata__: its quantised modules and its other tensors."""

    def dynamic(self, metadata: Mapping[str, str]) -> bool:
        """Whether a file's __metadata__ asks for activations under dynamic global scales."""

    def quantization_config(self, contents: Contents) -> dict[str, Any] | None:
        """The value of config.json's quantization_config."""

    def extra_files(self, contents: Contents) -> dict[str, dict[str, Any]]:
        """Further JSON files, name -> content."""


def scalar(value: float, shape: tuple[int, ...]) -> Tensor:
    """A one-element fp32 tensor."""
    return torch.full(shape, value, dtype=torch.float32)
