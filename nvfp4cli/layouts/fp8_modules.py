"""FP8 modules beside NVFP4 ones, under the names that compressed-tensors and ModelOpt share.

<m>.weight, float8_e4m3fn [N, K], with <m>.weight_scale and, with activations, <m>.input_scale, both
fp32 multipliers: compressed_tensors/compressors/quantized_compressors/naive_quantized.py,
"float-quantized", strategy "tensor"; modelopt/torch/export/unified_export_hf.py, "FP8". Engines
merge the parts of a fused layer under the largest of their scales, so these are one already.
"""

import re
from collections.abc import Collection

import torch
from torch import Tensor

from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.layouts.record import Shape, StoredFp8, scalar

_EXPERT = re.compile(r"\.experts\.\d+\..*")


def outputs(
    module: str, shape: Shape, activations: bool, scalar_shape: tuple[int, ...]
) -> tuple[Output, ...]:
    """The tensors that store a module; scalar_shape: that a layout gives its scalars."""
    found = [
        Output(f"{module}.weight", torch.float8_e4m3fn, shape),
        Output(f"{module}.weight_scale", torch.float32, scalar_shape),
    ]
    if activations:
        found.append(Output(f"{module}.input_scale", torch.float32, scalar_shape))
    return tuple(found)


def export(module: str, stored: StoredFp8, scalar_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Those tensors with their data."""
    found = {
        f"{module}.weight": stored.values,
        f"{module}.weight_scale": scalar(stored.scale, scalar_shape),
    }
    if stored.input_scale is not None:
        found[f"{module}.input_scale"] = scalar(stored.input_scale, scalar_shape)
    return found


def targets(modules: Collection[str]) -> list[str]:
    """Patterns that name modules and no others: their names, of experts one for all of a layer."""
    experts = {
        f"re:{re.escape(_EXPERT.sub('', module))}\\.experts\\..*"
        for module in modules
        if _EXPERT.search(module)
    }
    return [*sorted(module for module in modules if not _EXPERT.search(module)), *sorted(experts)]
