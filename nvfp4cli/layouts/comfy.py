"""ComfyUI's `comfy_quant` nvfp4: SWIZZLED scales, MULTIPLIER, the even element in the HIGH nibble.

comfy/float.py, comfy_kitchen/float_utils.py. Rows are padded to a multiple of 16 with zeros. One
file; the marker tensor, not config.json, says that a module is quantised.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.formats import e2m1, swizzle
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized
from nvfp4cli.layouts.record import CacheScales, Contents, Read, Shape, Stored, StoredFp8, scalar

NAME = "comfy"
SWIZZLED = True
SINGLE_FILE = True
INPUT_SCALES = True
CACHES: tuple[str, ...] = ()
FP8_SCHEMES: tuple[str, ...] = ()
BRANCHES = False
SERVE = "Use: copy {out}/model.safetensors to ComfyUI/models/text_encoders"

_MARKER = b'{"format": "nvfp4"}'
_ROWS = 16
# Rows before padding. Consumers take them from the model's code; we need them to convert back.
_ROWS_KEY = "nvfp4.rows"


def outputs(module: str, shape: Shape, activations: bool) -> tuple[Output, ...]:
    """weight, weight_scale, weight_scale_2, comfy_quant and, with activations, input_scale."""
    n, k = shape
    found = [
        Output(f"{module}.weight", torch.uint8, (_padded(n), k // 2)),
        Output(f"{module}.weight_scale", torch.float8_e4m3fn, swizzle.padded_shape(n, k // BLOCK)),
        Output(f"{module}.weight_scale_2", torch.float32, ()),
        Output(f"{module}.comfy_quant", torch.uint8, (len(_MARKER),)),
    ]
    if activations:
        found.append(Output(f"{module}.input_scale", torch.float32, ()))
    return tuple(found)


def export(module: str, stored: Stored) -> dict[str, Tensor]:
    """The tensors of a module."""
    weight = stored.weight
    n, k = weight.shape
    packed = torch.zeros(_padded(n), k // 2, dtype=torch.uint8)
    packed[:n] = e2m1.swap_nibbles(weight.packed)
    found = {
        f"{module}.weight": packed,
        f"{module}.weight_scale": swizzle.swizzle(weight.block_scale),
        f"{module}.weight_scale_2": scalar(weight.global_scale.multiplier, ()),
        f"{module}.comfy_quant": torch.frombuffer(bytearray(_MARKER), dtype=torch.uint8),
    }
    if stored.input_scale is not None:
        found[f"{module}.input_scale"] = scalar(stored.input_scale.multiplier, ())
    return found


def modules(names: Collection[str]) -> list[str]:
    """Modules with a marker and a weight_scale_2 (other comfy formats have none)."""
    return [
        name.removesuffix(".comfy_quant")
        for name in names
        if name.endswith(".comfy_quant")
        and name.removesuffix("comfy_quant") + "weight_scale_2" in names
    ]


def shape(module: str, checkpoint: Checkpoint) -> Shape:
    """From the packed codes, less the padding that our own files declare."""
    info = checkpoint.tensors[f"{module}.weight"]
    padded, half = info.shape
    rows = json.loads(checkpoint.metadata[info.file].get(_ROWS_KEY, "{}"))
    return int(rows.get(module, padded)), half * 2


def load(module: str, shape: Shape, read: Read, activations: bool) -> Stored:
    """Unswizzle the scales, swap the nibbles, drop the padding."""
    n, k = shape
    weight = Quantized(
        e2m1.swap_nibbles(read(f"{module}.weight")[:n]),
        swizzle.unswizzle(read(f"{module}.weight_scale"), n, k // BLOCK),
        GlobalScale.from_multiplier(read(f"{module}.weight_scale_2").item()),
    )
    if not activations:
        return Stored(weight)
    return Stored(weight, GlobalScale.from_multiplier(read(f"{module}.input_scale").item()))


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
        "The comfy layout cannot hold the scales of a KV cache: choose compressed-tensors or "
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
    """The rows of weights that padding makes taller."""
    rows = {module: n for module, (n, _) in quantized.items() if n % _ROWS}
    return {_ROWS_KEY: json.dumps(rows)} if rows else {}


def dynamic(metadata: Mapping[str, str]) -> bool:
    """Never: global scales are stored."""
    return False


def quantization_config(contents: Contents) -> None:
    """None: ComfyUI reads the markers."""
    return None


def extra_files(contents: Contents) -> dict[str, dict[str, Any]]:
    """None."""
    return {}


def _padded(rows: int) -> int:
    return -(-rows // _ROWS) * _ROWS
