"""What lies in the files, seen by tensor names and types alone, damaged modules included.

`layouts.open_weights` names the modules that can be read. Here a module that lacks a part still
counts as quantised, because the missing part is what has to be reported. A checkpoint without NVFP4
is seen as `quantize` sees it, through `layouts.sources`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.describe.record import Format, Weight
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.formats.nvfp4 import BLOCK
from nvfp4cli.layouts import LAYOUTS, branch
from nvfp4cli.layouts.fp8 import Fp8
from nvfp4cli.layouts.mxfp4 import Mxfp4
from nvfp4cli.layouts.record import Layout
from nvfp4cli.layouts.sources import Encoding, Source, open_source

# Suffixes that reveal a layout, in the order of LAYOUTS: ComfyUI's names are ModelOpt's and a
# marker, and ModelOpt's `.weight_scale` is everybody's.
_SIGNS = {
    "torchao": ("._weight_qdata",),
    "comfy": (".comfy_quant",),
    "compressed-tensors": (".weight_packed", ".weight_global_scale"),
    "modelopt": (".weight_scale_2", ".weight_scale"),
}
COMFY_HEADER = "_quantization_metadata"  # replaces the marker tensors where it is present
INPUT_SCALES = (".input_global_scale", ".input_scale", "._weight_act_per_tensor_scale")
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
_COMPANIONS = (*INPUT_SCALES, ".pre_quant_scale", ".comfy_quant", *branch.HALVES)
_FP8_SCALES = (".weight_scale", ".weight_scale_inv")


@dataclass(frozen=True)
class Inventory:
    """A checkpoint sorted into weights.

    layout: None where no weight is in NVFP4. unreadable: why a checkpoint without a layout cannot
    be read as float either, None where it can; then names may be those of parts.
    """

    checkpoint: Checkpoint
    layout: Layout | None
    weights: tuple[Weight, ...]  # in name order
    unreadable: str | None = None

    @cached_property
    def nvfp4(self) -> tuple[Weight, ...]:
        """The weights in NVFP4."""
        return tuple(weight for weight in self.weights if weight.format == "nvfp4")

    @cached_property
    def cache_scales(self) -> tuple[str, ...]:
        """Names of the stored scales of KV caches."""
        return tuple(name for name in self.checkpoint.tensors if name.endswith(_CACHE_SCALES))

    @cached_property
    def linears(self) -> dict[str, Weight]:
        """Modules that an engine can build as quantised linear layers, by name.

        All quantised ones, and plain matrices except tables of embeddings. Without a spec of the
        architecture the name is all that tells the two apart.
        """
        return {
            weight.module: weight
            for weight in self.weights
            if weight.format != "plain"
            or (
                weight.name.endswith(".weight")
                and weight.shape is not None
                and len(weight.shape) == 2
                and not _is_table(weight.module)
            )
        }

    def input_scale(self, weight: Weight) -> str | None:
        """Name of the static input scale of a weight, None if there is none."""
        return next((part for part in weight.parts if part.endswith(INPUT_SCALES)), None)

    def rank(self, weight: Weight) -> int | None:
        """Of the low-rank branch of a weight, None without one."""
        return branch.rank(weight.module, self.checkpoint.tensors)

    def weight_scale(self, weight: Weight) -> str | None:
        """Name of the scales of an FP8 or MXFP4 weight, None if there are none."""
        return next((part for part in weight.parts[1:] if not part.endswith(_COMPANIONS)), None)


def take(checkpoint: Checkpoint) -> Inventory:
    """Sort the tensors of a checkpoint into weights."""
    layout, unreadable = _layout(checkpoint), None
    if layout is None:
        try:
            return Inventory(checkpoint, None, tuple(_of_source(open_source(checkpoint))))
        except (CheckpointError, UnsupportedError) as error:
            unreadable = str(error)
    quantized = list(_nvfp4(layout, checkpoint))
    owned = {part for weight in quantized for part in weight.parts}
    # A damaged NVFP4 weight can look like one of these.
    others = [*_fp8(checkpoint), *_mxfp4(checkpoint)]
    quantized += [weight for weight in others if owned.isdisjoint(weight.parts)]
    owned |= {part for weight in quantized for part in weight.parts}
    plain = [
        Weight(name, "plain", info.shape, (name,))
        for name, info in checkpoint.tensors.items()
        if name not in owned and not name.endswith(_CACHE_SCALES)
    ]
    weights = sorted([*quantized, *plain], key=lambda weight: weight.name)
    return Inventory(checkpoint, layout, tuple(weights), unreadable)


def suffixes(layout: Layout) -> tuple[str, ...]:
    """What a layout appends to a module's name: for codes, block scales, global scale first."""
    return tuple(output.name for output in layout.outputs("", (BLOCK, BLOCK), False))


def _of_source(source: Source) -> Iterator[Weight]:
    for tensor in source.tensors.values():
        if not tensor.name.endswith(_CACHE_SCALES):
            module = tensor.name.removesuffix(".weight")
            companions = () if tensor.stored else _parts(module, (), source.checkpoint)
            parts = (*tensor.parts, *companions)
            yield Weight(tensor.name, _format(tensor.encoding), tensor.shape, parts)


def _format(encoding: Encoding | None) -> Format:
    """Of a weight in a checkpoint without NVFP4."""
    if encoding is None:
        return "plain"
    assert isinstance(encoding, Fp8 | Mxfp4)
    return "fp8" if isinstance(encoding, Fp8) else "mxfp4"


def _layout(checkpoint: Checkpoint) -> Layout | None:
    for name, layout in LAYOUTS.items():
        signs = _SIGNS[name]
        if name == "comfy" and any(COMFY_HEADER in m for m in checkpoint.metadata.values()):
            signs = _SIGNS["modelopt"]
        modules = _modules(signs, checkpoint)
        if any(_is_nvfp4(module, layout, checkpoint) for module in modules):
            return layout
    return None


def _modules(endings: tuple[str, ...], checkpoint: Checkpoint) -> set[str]:
    return {
        name.removesuffix(ending)
        for name in checkpoint.tensors
        for ending in endings
        if name.endswith(ending)
    }


def _is_nvfp4(module: str, layout: Layout, checkpoint: Checkpoint) -> bool:
    """True with a global scale, or with E4M3 block scales (MXFP4 has E8M0, FP8 has floats)."""
    _, scale, global_scale = (checkpoint.tensors.get(module + s) for s in suffixes(layout)[:3])
    if global_scale is not None:
        return True
    return scale is not None and scale.dtype == torch.float8_e4m3fn


def _nvfp4(layout: Layout | None, checkpoint: Checkpoint) -> Iterator[Weight]:
    if layout is None:
        return
    required = suffixes(layout)
    for module in _modules(required[:3], checkpoint):
        if not _is_nvfp4(module, layout, checkpoint):
            continue
        try:
            shape = layout.shape(module, checkpoint)
        except (KeyError, ValueError):
            shape = None
        yield Weight(f"{module}.weight", "nvfp4", shape, _parts(module, required, checkpoint))


def _fp8(checkpoint: Checkpoint) -> Iterator[Weight]:
    for name, info in checkpoint.tensors.items():
        for codes, scales in ((".weight", _FP8_SCALES), ("._weight_qdata", ("._weight_scale",))):
            module = name.removesuffix(codes)
            if name.endswith(codes) and info.dtype == torch.float8_e4m3fn:
                parts = _parts(module, (codes, *scales), checkpoint)
                yield Weight(f"{module}.weight", "fp8", info.shape, parts)


def _mxfp4(checkpoint: Checkpoint) -> Iterator[Weight]:
    for module in _modules((".weight_packed",), checkpoint):
        scale = checkpoint.tensors.get(f"{module}.weight_scale")
        shape = checkpoint.tensors[f"{module}.weight_packed"].shape
        if scale is not None and scale.dtype == torch.uint8 and len(shape) == 2:
            parts = _parts(module, (".weight_packed", ".weight_scale"), checkpoint)
            yield Weight(f"{module}.weight", "mxfp4", (shape[0], shape[1] * 2), parts)


def _parts(module: str, endings: tuple[str, ...], checkpoint: Checkpoint) -> tuple[str, ...]:
    wanted = dict.fromkeys(module + ending for ending in (*endings, *_COMPANIONS))
    return tuple(name for name in wanted if name in checkpoint.tensors)


def _is_table(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return "embed" in leaf or leaf in ("wte", "wpe", "shared")
