"""On-disk conventions of NVFP4 checkpoints, one module each, and any checkpoint read through them.

Layouts only rename and repack the canonical record; no number changes here.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import CheckpointError, UnsupportedError, WeightError
from nvfp4cli.formats import e4m3
from nvfp4cli.formats.fp8 import decode as decode_fp8
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.formats.nvfp4 import GlobalScale, dequantize
from nvfp4cli.layouts import branch, comfy, compressed_tensors, modelopt, torchao
from nvfp4cli.layouts.record import CacheScales, Layout, Shape, Stored, StoredFp8

LAYOUTS: dict[str, Layout] = {
    layout.NAME: layout for layout in (torchao, comfy, compressed_tensors, modelopt)
}

# Scales of activations and KV caches, which stand beside the source model's own tensors.
_INPUT_SCALE_SUFFIXES = (".input_global_scale", ".input_scale")
_FP8_PARTS = ("weight", "weight_scale")
_MARKER_SUFFIX = ".comfy_quant"
_AUXILIARY_SUFFIXES = (*_INPUT_SCALE_SUFFIXES, ".k_scale", ".v_scale", _MARKER_SUFFIX)
# compressed-tensors names them after the attention module, ModelOpt after a projection in it.
_CACHE_SCALE = re.compile(r"(.+?)(?:\.(?:k|v|qkv)_proj)?\.([kv])_scale")

# What fp32 holds without a rounding; llm-compressor writes bfloat16.
_SCALAR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        modules = [*self.quantized, *(self.fp8 if self.quantized else ())]
        return tuple(sorted([*(f"{module}.weight" for module in modules), *self.plain]))

    @cached_property
    def plain(self) -> tuple[str, ...]:
        """Names of the tensors stored as they were in the source."""
        owned = {output.name for module in self.quantized for output in self._parts(module, False)}
        if self.quantized:
            owned |= {f"{module}.{part}" for module in self.fp8 for part in _FP8_PARTS}
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
        """True where static input scales of NVFP4 weights are stored (W4A4)."""
        scaled = set(self.auxiliary)
        return any(
            module + suffix in scaled
            for module in self.quantized
            for suffix in _INPUT_SCALE_SUFFIXES
        )

    @cached_property
    def fp8(self) -> dict[str, str | None]:
        """Modules in FP8 -> the name of their static input scale, if there is one.

        Of a checkpoint without NVFP4 too.
        """
        tensors, found = self.checkpoint.tensors, {}
        for name, info in tensors.items():
            module = name.removesuffix(".weight")
            scaled = f"{name}_scale" in tensors
            if module != name and info.dtype == torch.float8_e4m3fn and scaled:
                static = f"{module}.input_scale"
                found[module] = static if static in tensors else None
        return found

    def stored_fp8(self, module: str) -> StoredFp8:
        """A module of `fp8`. Raises WeightError where a scale is no usable number."""
        name = f"{module}.weight_scale"
        self._check_global_scale(module, name)
        return StoredFp8(
            self.checkpoint.read(f"{module}.weight"),
            self.checkpoint.read(name).item(),
            self.fp8_input_scale(module),
        )

    def fp8_input_scale(self, module: str) -> float | None:
        """The static input scale of a module of `fp8`, None for one without.

        Raises WeightError where it is no usable number.
        """
        name = self.fp8[module]
        if name is None:
            return None
        self._check_global_scale(module, name)
        return self.checkpoint.read(name).item()

    @cached_property
    def caches(self) -> dict[str, dict[str, str]]:
        """Attention modules -> "k" and "v" -> name of the scale in the KV cache, where stored."""
        found: dict[str, dict[str, str]] = {}
        for name in self.auxiliary:
            if match := _CACHE_SCALE.fullmatch(name):
                found.setdefault(match[1], {})[match[2]] = name
        return found

    @cached_property
    def dynamic(self) -> bool:
        """True where engines quantise activations under scales of their own, and none is stored."""
        if self.layout is None:
            return False
        return any(self.layout.dynamic(entries) for entries in self.checkpoint.metadata.values())

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

    def cache_scales(self, attention: str) -> CacheScales:
        """The scales of an attention module's KV cache, without a rounding.

        Raises CheckpointError where one is missing, UnsupportedError where it is not one number,
        WeightError where it is no usable one.
        """
        names = self.caches[attention]
        return CacheScales(*(self._cache_scale(attention, names.get(kind)) for kind in "kv"))

    def _cache_scale(self, attention: str, name: str | None) -> float:
        if name is None:
            raise CheckpointError(
                f"{attention} lacks a k_scale or a v_scale: calibrate the KV cache again."
            )
        info = self.checkpoint.tensors[name]
        if info.numel != 1 or info.dtype not in _SCALAR_DTYPES:
            raise UnsupportedError(
                f"{name} is {_form(info)}, and the scale of a KV cache is read as one number: "
                "calibrate the cache per tensor."
            )
        value: float = self.checkpoint.read(name).item()
        if not 0 < value < math.inf:
            raise WeightError(
                f"{name} is {value}, and a scale must be positive and finite: calibrate the KV "
                "cache again."
            )
        return value

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
        if self.quantized and module in self.fp8:
            stored = self.stored_fp8(module)
            return decode_fp8(stored.values, stored.scale)
        return self.checkpoint.read(name)


def _form(tensor: TensorInfo | Output) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def open_weights(checkpoint: Checkpoint) -> StoredWeights:
    """See a checkpoint through the layout its tensor names reveal."""
    for layout in LAYOUTS.values():
        if layout.modules(checkpoint.tensors.keys()):
            return StoredWeights(checkpoint, layout)
    return StoredWeights(checkpoint, None)
