"""ModelOpt's Hugging Face export: linear scales, global scale as a MULTIPLIER.

modelopt/torch/quantization/qtensor/nvfp4_tensor.py. Read by vLLM, SGLang, TensorRT-LLM.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized
from nvfp4cli.layouts import branch, fp8_modules
from nvfp4cli.layouts.record import (
    CacheScales,
    Contents,
    Read,
    Shape,
    Stored,
    StoredFp8,
    scalar,
)

NAME = "modelopt"
SWIZZLED = False
SINGLE_FILE = False
INPUT_SCALES = True
CACHES = ("fp8", "nvfp4")
FP8_SCHEMES = ("w4a4",)  # its FP8 is never weight-only
BRANCHES = True
SERVE = "Serve: vllm serve {out}"

# Engines read "modelopt" as the producer of the convention, not of the file.
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def outputs(module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
    """weight, weight_scale, weight_scale_2 and, with activations, input_scale."""
    n, k = shape
    found = [
        Output(f"{module}.weight", torch.uint8, (n, k // 2)),
        Output(f"{module}.weight_scale", torch.float8_e4m3fn, (n, k // BLOCK)),
        Output(f"{module}.weight_scale_2", torch.float32, ()),
    ]
    if activations:
        found.append(Output(f"{module}.input_scale", torch.float32, ()))
    return tuple(found)


def export(module: str, stored: Stored) -> dict[str, Tensor]:
    """The tensors of a module."""
    weight = stored.weight
    found = {
        f"{module}.weight": weight.packed,
        f"{module}.weight_scale": weight.block_scale,
        f"{module}.weight_scale_2": scalar(weight.global_scale.multiplier, ()),
    }
    if stored.input_scale is not None:
        found[f"{module}.input_scale"] = scalar(stored.input_scale.multiplier, ())
    if stored.branch is not None:
        found |= branch.export(module, stored.branch)
    return found


def modules(names: Collection[str]) -> list[str]:
    """Modules with a weight_scale_2 and no comfy_quant marker."""
    return [
        name.removesuffix(".weight_scale_2")
        for name in names
        if name.endswith(".weight_scale_2")
        and name.removesuffix("weight_scale_2") + "comfy_quant" not in names
    ]


def shape(module: str, checkpoint: Checkpoint) -> Shape:
    """From the packed codes."""
    n, half = checkpoint.tensors[f"{module}.weight"].shape
    return n, half * 2


def load(module: str, shape: Shape, read: Read, activations: bool) -> Stored:
    """Nothing to reorder."""
    weight = Quantized(
        read(f"{module}.weight"),
        read(f"{module}.weight_scale"),
        GlobalScale.from_multiplier(read(f"{module}.weight_scale_2").item()),
    )
    if not activations:
        return Stored(weight)
    return Stored(weight, GlobalScale.from_multiplier(read(f"{module}.input_scale").item()))


def input_scale(stored: float) -> GlobalScale:
    """Stored as the multiplier."""
    return GlobalScale.from_multiplier(stored)


def fp8_outputs(module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
    """weight, weight_scale and, with activations, input_scale."""
    return fp8_modules.outputs(module, shape, activations, ())


def fp8_export(module: str, stored: StoredFp8) -> dict[str, Tensor]:
    """The tensors of a module."""
    return fp8_modules.export(module, stored, ())


def cache_outputs(attention: str) -> tuple[Output, ...]:
    """k_scale and v_scale, beside the projections."""
    return (
        Output(f"{attention}.k_proj.k_scale", torch.float32, ()),
        Output(f"{attention}.v_proj.v_scale", torch.float32, ()),
    )


def cache_export(attention: str, scales: CacheScales) -> dict[str, Tensor]:
    """Multipliers."""
    return {
        f"{attention}.k_proj.k_scale": scalar(scales.key, ()),
        f"{attention}.v_proj.v_scale": scalar(scales.value, ()),
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
    """The form inlined in config.json (modelopt/torch/export/convert_hf_config.py)."""
    # ModelOpt itself writes the name of NVFP4 there, and of FP8 what it is.
    schemes: dict[str, Any] = {"fp8": _FP8, "nvfp4": "NVFP4"}
    caches = {"kv_cache_scheme": schemes[contents.caches]} if contents.caches else {}
    return {
        "quant_method": "modelopt",
        "quant_algo": _algorithm(contents),
        "ignore": sorted(contents.kept),
        "config_groups": _groups(contents),
        **_layers(contents),
        "producer": _PRODUCER,
        **caches,
    }


def extra_files(contents: Contents) -> dict[str, dict[str, Any]]:
    """hf_quant_config.json, which TensorRT-LLM and older engines read."""
    quantization: dict[str, Any] = {
        "quant_algo": _algorithm(contents),
        "kv_cache_quant_algo": contents.caches.upper() if contents.caches else None,
        "group_size": BLOCK,
        "exclude_modules": sorted(contents.kept),
        **_layers(contents),
    }
    if contents.rank is not None:  # the name of the algorithm leaves open what activations are
        quantization |= {"lora_rank": contents.rank, "config_groups": _groups(contents)}
    return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


def _groups(contents: Contents) -> dict[str, Any]:
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    group: dict[str, Any] = {"weights": values, "targets": ["Linear"]}
    if contents.activations:
        group["input_activations"] = values
    if contents.rank is not None:
        group |= {"pre_quant_scale": False, "lora_rank": contents.rank}
    if not contents.fp8:
        return {"group_0": group}
    group["targets"] = sorted(contents.quantized)
    others = {"weights": _FP8, "input_activations": _FP8, "targets": sorted(contents.fp8)}
    return {"group_0": group, "group_1": others}


def _algorithm(contents: Contents) -> str:
    if contents.rank is not None:
        return "NVFP4_SVD"
    return "MIXED_PRECISION" if contents.fp8 else _nvfp4(contents)


def _nvfp4(contents: Contents) -> str:
    return "NVFP4" if contents.activations else "W4A16_NVFP4"


def _layers(contents: Contents) -> dict[str, Any]:
    """The algorithm of each module, which mixed checkpoints state."""
    if not contents.fp8:
        return {}
    nvfp4, fp8 = {"quant_algo": _nvfp4(contents), "group_size": BLOCK}, {"quant_algo": "FP8"}
    found = {**dict.fromkeys(contents.quantized, nvfp4), **dict.fromkeys(contents.fp8, fp8)}
    return {"quantized_layers": dict(sorted(found.items()))}
