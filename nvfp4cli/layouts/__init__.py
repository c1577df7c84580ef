"""On-disk conventions of NVFP4 checkpoints, one module each, and any checkpoint read through them.

Layouts only rename and repack the canonical record; no number changes here.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import CheckpointError, WeightError
from nvfp4cli.formats import e4m3
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.formats.nvfp4 import GlobalScale, dequantize
from nvfp4cli.layouts import branch, comfy, compressed_tensors, modelopt, torchao
from nvfp4cli.layouts.record import Layout, Shape, Stored

LAYOUTS: dict[str, Layout] = {
    layout.NAME: layout for layout in (torchao, comfy, compressed_tensors, modelopt)
}

# Scales of activations and KV caches, which stand beside the source model's own tensors.
_INPUT_SCALE_SUFFIXES = (".input_global_scale", ".input_scale")
_MARKER_SUFFIX = ".comfy_quant"
_AUXILIARY_SUFFIXES = (*_INPUT_SCALE_SUFFIXES, ".k_scale", ".v_scale", _MARKER_SUFFIX)


@dataclass(frozen=True)
class StoredWeights:
    """A checkpoint of any layout, or an unquantised one, under the source model's tensor names."""

    checkpoint: Checkpoint
    layout: Layout | None  # None: no NVFP4 weight in it

    @cached_property
    def quantized(self) -> dict[str, Shape]:
        """Quantised modules in name order -> (out, in)."""
        if self.layout is None:
            return {}
        found = {}
        for module in sorted(self.layout.modules(self.checkpoint.tensors.keys())):
            try:
                found[module] = self.layout.shape(module, self.checkpoint)
            except (KeyError, ValueError):
                raise CheckpointError(
                    f"The {self.layout.NAME} tensors of {module} are incomplete or have the wrong "
                    "rank: quantise the source again."
                ) from None
        return found

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The source model's tensor names, sorted."""
        return tuple(sorted([*(f"{m}.weight" for m in self.quantized), *self.plain]))

    @cached_property
    def plain(self) -> tuple[str, ...]:
        """Names of the tensors stored as they were in the source."""
        owned = {output.name for module in self.quantized for output in self._parts(module, False)}
        return tuple(
            name
            for name in sorted(self.checkpoint.tensors)
            if name not in owned and not (self.quantized and name.endswith(_AUXILIARY_SUFFIXES))
        )

    @cached_property
    def auxiliary(self) -> tuple[str, ...]:
        """Names of stored tensors that belong to the quantisation of activations or KV caches."""
        return tuple(
            name
            for name in sorted(self.checkpoint.tensors)
            if self.quantized
            and name.endswith(_AUXILIARY_SUFFIXES)
            and not name.endswith(_MARKER_SUFFIX)
        )

    @cached_property
    def activations(self) -> bool:
        """True where static input scales are stored (W4A4)."""
        return any(name.endswith(_INPUT_SCALE_SUFFIXES) for name in self.auxiliary)

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Quantised modules with a low-rank branch, or a half of one -> its rank."""
        if self.layout is None or not self.layout.BRANCHES:
            return {}
        found = {m: branch.rank(m, self.checkpoint.tensors) for m in self.quantized}
        return {module: rank for module, rank in found.items() if rank is not None}

    def part_names(self, module: str) -> tuple[str, ...]:
        """Names of the tensors that make up the weight of a quantised module."""
        return tuple(part.name for part in self._parts(module, False))

    def rows(self, module: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a quantised weight and its branch, fp32."""
        own = self.stored(module).rows(start, stop)
        return own.whole(dequantize(own.weight))

    def stored(self, module: str, activations: bool = False) -> Stored:
        """The canonical record of a quantised module, on request with its input scale.

        Raises CheckpointError where a part is missing or misshapen, WeightError where a scale is
        no usable number.
        """
        assert self.layout is not None
        self.check_parts(module, activations)
        shape = self.quantized[module]
        parts = tuple(self._parts(module, activations))
        for part in parts:
            if part.dtype == torch.float32:
                self._check_global_scale(module, part.name)
        try:
            stored = self.layout.load(module, shape, self.checkpoint.read, activations)
        except ValueError as error:
            raise WeightError(
                f"The weights of {module} cannot be read, {error}: quantise the source again."
            ) from None
        for part in parts:
            if part.dtype == torch.float8_e4m3fn:
                self._check_block_scales(part.name, stored.weight.block_scale)
        return replace(stored, branch=self.branch(module)) if module in self.ranks else stored

    def branch(self, module: str) -> LowRank:
        """The low-rank branch of a module that has one.

        Raises CheckpointError where a half is missing or misshapen, WeightError where one is not
        finite.
        """
        for part in branch.outputs(module, self.quantized[module], self.ranks[module]):
            self._check_part(part)
        found = branch.load(module, self.checkpoint.read)
        if not found.finite:
            raise WeightError(
                f"The low-rank branch of {module} holds NaN or Inf: quantise the source again."
            )
        return found

    def input_scale(self, module: str) -> GlobalScale:
        """The static activation scale of a quantised module of a W4A4 checkpoint.

        Raises CheckpointError where it is missing, WeightError where it is no usable number.
        """
        assert self.layout is not None
        shape = self.quantized[module]
        plain = {part.name for part in self.layout.outputs(module, shape, False)}
        part = next(p for p in self.layout.outputs(module, shape, True) if p.name not in plain)
        self._check_part(part)
        self._check_global_scale(module, part.name)
        return self.layout.input_scale(self.checkpoint.read(part.name).item())

    def check_parts(self, module: str, activations: bool) -> None:
        """Raise CheckpointError where a part of a quantised module is missing or misshapen."""
        for part in self._parts(module, activations):
            self._check_part(part)

    def _parts(self, module: str, activations: bool) -> Iterator[Output]:
        """The tensors that a quantised module should have."""
        assert self.layout is not None
        shape = self.quantized[module]
        yield from self.layout.outputs(module, shape, activations)
        if module in self.ranks:
            yield from branch.outputs(module, shape, self.ranks[module])

    def _check_global_scale(self, module: str, name: str) -> None:
        value, file = self.checkpoint.read(name).item(), self.checkpoint.tensors[name].file
        if not 0 < value < math.inf:
            raise WeightError(
                f"The weights of {module} cannot be read, a global scale is {value} where it must "
                f"be positive and finite ({name} in {file}): quantise the source again."
            )

    def _check_block_scales(self, name: str, block_scale: Tensor) -> None:
        """block_scale: float8_e4m3fn [N, K/16]; bytes from NaN's up are NaN or negative."""
        bad = int((block_scale.view(torch.uint8) >= e4m3.NAN_BYTE).sum())
        if bad:
            raise WeightError(
                f"{name} in {self.checkpoint.tensors[name].file} holds {bad} block "
                f"scale{'s' if bad > 1 else ''} that {'are' if bad > 1 else 'is'} NaN or negative: "
                "quantise the source again."
            )

    def _check_part(self, part: Output) -> None:
        """Raise unless a tensor of the name, dtype and shape that the layout asks for is stored.

        Of a scalar and of swizzled bytes only the number of values matters, of comfy's marker
        only its presence.
        """
        assert self.layout is not None
        info = self.checkpoint.tensors.get(part.name)
        if info is None:
            raise CheckpointError(
                f"{self.checkpoint.folder} lacks {part.name}: quantise the source again."
            )
        numel = math.prod(part.shape)
        shapeless = numel == 1 or self.layout.SWIZZLED
        fits = info.numel == numel if shapeless else info.shape == part.shape
        if (info.dtype, fits) != (part.dtype, True) and not part.name.endswith(_MARKER_SUFFIX):
            raise CheckpointError(
                f"{part.name} is {_form(info)} where the {self.layout.NAME} layout stores "
                f"{_form(part)} (in {info.file}): quantise the source again."
            )

    def tensor(self, name: str) -> Tensor:
        """A source tensor: dequantised to fp32, or as stored."""
        module = name.removesuffix(".weight")
        if module in self.quantized:
            return self.rows(module, 0, self.quantized[module][0])
        return self.checkpoint.read(name)


def _form(tensor: TensorInfo | Output) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def open_weights(checkpoint: Checkpoint) -> StoredWeights:
    """See a checkpoint through the layout its tensor names reveal."""
    for layout in LAYOUTS.values():
        if layout.modules(checkpoint.tensors.keys()):
            return StoredWeights(checkpoint, layout)
    return StoredWeights(checkpoint, None)
