"""torchao's NVFP4Tensor flattened into safetensors: SWIZZLED scales, MULTIPLIER.

torchao/prototype/safetensors/safetensors_support.py. Read by transformers and vLLM as it is.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.formats import swizzle
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized
from nvfp4cli.layouts.record import CacheScales, Contents, Read, Shape, Stored, StoredFp8, scalar

NAME = "torchao"
SWIZZLED = True
SINGLE_FILE = False
INPUT_SCALES = False  # transformers' loader does not know the name of the activation scale
CACHES: tuple[str, ...] = ()
FP8_SCHEMES: tuple[str, ...] = ()
BRANCHES = False
SERVE = "Serve: vllm serve {out}"

_QDATA = "._weight_qdata"
_SCALE = "._weight_scale"
_PER_TENSOR = "._weight_per_tensor_scale"

# Of torchao's own kernel for activations, which needs the package mslk, no use is made.
_ACTIVATIONS = {
    "_type": "QuantizeTensorToNVFP4Kwargs",
    "_data": {
        "block_size": BLOCK,
        "is_swizzled_scales": True,
        "use_triton_kernel": False,
        "use_dynamic_per_tensor_scale": True,
    },
}


def outputs(module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
    """qdata, scale and per_tensor_scale.

    The swizzled scales are given torchao's shape [32 * row tiles, 16 * column tiles].
    """
    if activations:
        raise UnsupportedError(
            "The torchao layout cannot hold static input scales: choose compressed-tensors or "
            "modelopt."
        )
    n, k = shape
    return (
        Output(module + _QDATA, torch.uint8, (n, k // 2)),
        Output(module + _SCALE, torch.float8_e4m3fn, _scale_shape(shape)),
        Output(module + _PER_TENSOR, torch.float32, ()),
    )


def export(module: str, stored: Stored) -> dict[str, Tensor]:
    """The tensors of a module."""
    weight = stored.weight
    return {
        module + _QDATA: weight.packed,
        module + _SCALE: swizzle.swizzle(weight.block_scale).view(_scale_shape(weight.shape)),
        module + _PER_TENSOR: scalar(weight.global_scale.multiplier, ()),
    }


def modules(names: Collection[str]) -> list[str]:
    """Modules with a qdata and a per-tensor scale (torchao's other 4-bit tensors have none)."""
    return [
        name.removesuffix(_QDATA)
        for name in names
        if name.endswith(_QDATA) and name.removesuffix(_QDATA) + _PER_TENSOR in names
    ]


def shape(module: str, checkpoint: Checkpoint) -> Shape:
    """From the packed codes."""
    n, half = checkpoint.tensors[module + _QDATA].shape
    return n, half * 2


def load(module: str, shape: Shape, read: Read, activations: bool) -> Stored:
    """Unswizzle the scales."""
    n, k = shape
    return Stored(
        Quantized(
            read(module + _QDATA),
            swizzle.unswizzle(read(module + _SCALE), n, k // BLOCK),
            GlobalScale.from_multiplier(read(module + _PER_TENSOR).item()),
        )
    )


def input_scale(stored: float) -> GlobalScale:
    """Stored as the multiplier."""
    return GlobalScale.from_multiplier(stored)


def fp8_outputs(module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
    """None: it has no such modules."""
    return ()


def fp8_export(module: str, stored: StoredFp8) -> dict[str, Tensor]:
    """None."""
    return {}


def cache_outputs(attention: str) -> tuple[Output, ...]:
    """Refused."""
    raise UnsupportedError(
        "The torchao layout cannot hold the scales of a KV cache: choose compressed-tensors or "
        "modelopt."
    )


def cache_export(attention: str, scales: CacheScales) -> dict[str, Tensor]:
    """None."""
    return {}


def header_metadata(
    quantized: Mapping[str, Shape],
    plain: Collection[str],
    dtype: torch.dtype,
    activations: bool = False,
) -> dict[str, str]:
    """A description of each tensor subclass, under the weight's name, and the list of all."""
    description = {
        "_type": "NVFP4Tensor",
        "_data": {
            "block_size": BLOCK,
            "orig_dtype": {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")},
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "act_quant_kwargs": _ACTIVATIONS if activations else None,
        },
        "_tensor_data_names": ["qdata", "scale", "per_tensor_scale"],
    }
    weights = [f"{module}.weight" for module in quantized]
    entries = {name: json.dumps(description) for name in weights}
    entries |= {name: json.dumps({"_type": "Tensor"}) for name in plain}
    return {**entries, "tensor_names": json.dumps(sorted(entries))}


def dynamic(metadata: Mapping[str, str]) -> bool:
    """Where the description of a weight says how to quantise its input.

    Raises CheckpointError for a description that cannot be read.
    """
    try:
        found = [json.loads(text) for name, text in metadata.items() if name.endswith(".weight")]
        kinds = [one["_data"].get("act_quant_kwargs") for one in found if "_data" in one]
        return any(kind and kind["_data"]["use_dynamic_per_tensor_scale"] for kind in kinds)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"The __metadata__ in the header of a file is damaged ({error}): restore the file."
        ) from None


def quantization_config(contents: Contents) -> dict[str, Any]:
    """transformers' TorchAoConfig. vLLM reads only the key "default" of quant_type."""
    kind, data = "NVFP4WeightOnlyConfig", {"use_dynamic_per_tensor_scale": True}
    if contents.activations:
        kind = "NVFP4DynamicActivationNVFP4WeightConfig"
        data |= {"use_triton_kernel": False}
    config = {"_type": kind, "_version": 1, "_data": data}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": config},
        "modules_to_not_convert": sorted(contents.kept),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def extra_files(contents: Contents) -> dict[str, dict[str, Any]]:
    """None."""
    return {}


def _scale_shape(shape: Shape) -> Shape:
    rows, columns = swizzle.padded_shape(shape[0], shape[1] // BLOCK)
    return rows // 4, columns * 4
