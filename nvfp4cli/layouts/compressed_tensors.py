"""`nvfp4-pack-quantized` of compressed-tensors: linear scales, global scale as a DIVISOR.

compressed_tensors/compressors/nvfp4/base.py. Read by vLLM, SGLang, transformers, TensorRT-LLM.
Engines swizzle the scales when they load; swizzled bytes under these names have the same shape
wherever N % 128 == 0 and K % 64 == 0, would load without an error and give garbage.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized
from nvfp4cli.layouts import fp8_modules
from nvfp4cli.layouts.record import (
    CacheScales,
    Contents,
    Read,
    Shape,
    Stored,
    StoredFp8,
    scalar,
)

NAME = "compressed-tensors"
SWIZZLED = False
SINGLE_FILE = False
INPUT_SCALES = True
CACHES = ("fp8",)
FP8_SCHEMES = ("w4a16", "w4a4")
BRANCHES = False
SERVE = "Serve: vllm serve {out}"

_FORMAT = "nvfp4-pack-quantized"
_MIXED = "mixed-precision"
# Of a KV cache, and of modules in FP8.
_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def outputs(module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
    """weight_packed, weight_scale, weight_global_scale and, with activations, the input's."""
    n, k = shape
    found = [
        Output(f"{module}.weight_packed", torch.uint8, (n, k // 2)),
        Output(f"{module}.weight_scale", torch.float8_e4m3fn, (n, k // BLOCK)),
        Output(f"{module}.weight_global_scale", torch.float32, (1,)),
    ]
    if activations:
        found.append(Output(f"{module}.input_global_scale", torch.float32, (1,)))
    return tuple(found)


def export(module: str, stored: Stored) -> dict[str, Tensor]:
    """The tensors of a module."""
    weight = stored.weight
    found = {
        f"{module}.weight_packed": weight.packed,
        f"{module}.weight_scale": weight.block_scale,
        f"{module}.weight_global_scale": scalar(weight.global_scale.divisor, (1,)),
    }
    if stored.input_scale is not None:
        found[f"{module}.input_global_scale"] = scalar(stored.input_scale.divisor, (1,))
    return found


def modules(names: Collection[str]) -> list[str]:
    """Modules with a weight_packed and an NVFP4 global scale (MXFP4 has none)."""
    return [
        name.removesuffix(".weight_packed")
        for name in names
        if name.endswith(".weight_packed") and name.removesuffix("packed") + "global_scale" in names
    ]


def shape(module: str, checkpoint: Checkpoint) -> Shape:
    """From the packed codes."""
    n, half = checkpoint.tensors[f"{module}.weight_packed"].shape
    return n, half * 2


def load(module: str, shape: Shape, read: Read, activations: bool) -> Stored:
    """Nothing to reorder."""
    divisor = read(f"{module}.weight_global_scale").item()
    weight = Quantized(
        read(f"{module}.weight_packed"),
        read(f"{module}.weight_scale"),
        GlobalScale.from_divisor(divisor),
    )
    if not activations:
        return Stored(weight)
    return Stored(weight, GlobalScale.from_divisor(read(f"{module}.input_global_scale").item()))


def input_scale(stored: float) -> GlobalScale:
    """Stored as the divisor."""
    return GlobalScale.from_divisor(stored)


def fp8_outputs(module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
    """weight, weight_scale and, with activations, input_scale."""
    return fp8_modules.outputs(module, shape, activations, (1,))


def fp8_export(module: str, stored: StoredFp8) -> dict[str, Tensor]:
    """The tensors of a module."""
    return fp8_modules.export(module, stored, (1,))


def cache_outputs(attention: str) -> tuple[Output, ...]:
    """k_scale and v_scale."""
    return (
        Output(f"{attention}.k_scale", torch.float32, (1,)),
        Output(f"{attention}.v_scale", torch.float32, (1,)),
    )


def cache_export(attention: str, scales: CacheScales) -> dict[str, Tensor]:
    """Multipliers."""
    return {
        f"{attention}.k_scale": scalar(scales.key, (1,)),
        f"{attention}.v_scale": scalar(scales.value, (1,)),
    }


def header_metadata(
    quantized: Mapping[str, Shape],
    plain: Collection[str],
    dtype: torch.dtype,
    activations: bool = False,
) -> dict[str, str]:
    """Nothing beyond the names."""
    return {}


def dynamic(metadata: Mapping[str, str]) -> bool:
    """Never: global scales are stored."""
    return False


def quantization_config(contents: Contents) -> dict[str, Any]:
    """The subset that old and new engines accept.

    `scale_dtype` and `zp_dtype` are left out of the weights' part: schemas before
    compressed-tensors 0.13 forbid them and later ones do not need them. Of activations, whose block
    scales are computed at run time, compressed-tensors leaves the scales unrounded without it.
    """
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
    }
    activations = {**weights, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
    group = {
        # Class names stand in the way of other groups: some engines take names alone then.
        "targets": fp8_modules.targets(contents.quantized) if contents.fp8 else ["Linear"],
        "weights": weights,
        "input_activations": activations if contents.activations else None,
        "output_activations": None,
        "format": _FORMAT,
    }
    others = {"group_1": _fp8_group(contents)} if contents.fp8 else {}
    return {
        "quant_method": "compressed-tensors",
        "format": _MIXED if contents.fp8 else _FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": _FP8 if contents.caches else None,
        "ignore": sorted(contents.kept),
        "config_groups": {"group_0": group, **others},
    }


def _fp8_group(contents: Contents) -> dict[str, Any]:
    return {
        "targets": fp8_modules.targets(contents.fp8),
        "weights": _FP8,
        "input_activations": _FP8 if contents.activations else None,
        "output_activations": None,
        "format": "float-quantized",
    }


def extra_files(contents: Contents) -> dict[str, dict[str, Any]]:
    """None."""
    return {}
