"""What a checkpoint says of its quantisation, and the kinds that cannot be read as float.

config.json's `quantization_config` (transformers/utils/quantization_config.py); a wrapper of a
language model may have it one level down. Older ModelOpt exports have hf_quant_config.json only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nvfp4cli.checkpoint.reader import Checkpoint, read_json
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.layouts.fp8 import BLOCK

_KEYS = ("quantization_config", "compression_config")  # the second: compressed-tensors before 0.6
_MODELOPT_FILE = "hf_quant_config.json"

_METHODS = frozenset(
    ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed",
     "mxfp4", "torchao")
)  # fmt: skip
# compressed_tensors/config/base.py, `CompressionFormat`
_FORMATS = frozenset(
    ("dense", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
     "mxfp4-pack-quantized", "mixed-precision")
)  # fmt: skip
# modelopt/torch/export/convert_hf_config.py
_ALGORITHMS = frozenset(
    ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4_SVD", "W4A16_NVFP4",
     "MIXED_PRECISION")
)  # fmt: skip
_OFFLINE = frozenset(("weight_input", "weight_output"))


@dataclass(frozen=True)
class Declared:
    """keys: the paths in config.json that state the quantisation. block: rows and columns under
    one scale of a block-quantised FP8 weight."""

    keys: tuple[tuple[str, ...], ...]
    block: tuple[int, int]


def declared(checkpoint: Checkpoint) -> Declared:
    """Read the declaration. Raises UnsupportedError for a kind that cannot be read as float, by
    its name, and CheckpointError for a malformed one.

    Without any, the names and dtypes of the tensors alone decide how they are read.
    """
    found = dict(_found(checkpoint.config))
    blocks = set()
    for path, value in found.items():
        _check(value)
        blocks |= set(_blocks(value, ".".join(path)))
    if not found and (checkpoint.folder / _MODELOPT_FILE).is_file():
        content = read_json(checkpoint.folder / _MODELOPT_FILE).get("quantization")
        if content is not None:
            _check({"quant_method": "modelopt", **_mapping(content, _MODELOPT_FILE)})
    if len(blocks) > 1:
        sizes = " and ".join(f"{rows}x{columns}" for rows, columns in sorted(blocks))
        raise UnsupportedError(
            f"config.json declares FP8 blocks of {sizes}, and one size is read: {_REMEDY}."
        )
    return Declared(tuple(found), blocks.pop() if blocks else BLOCK)


def caches(checkpoint: Checkpoint) -> set[str]:
    """The formats that KV caches are declared to be in, such as "FP8"; empty without any.

    ModelOpt states them twice, "DYNAMIC" is one whose scales are computed while the model runs.
    """
    stated = [value for _, value in _found(checkpoint.config)]
    if (checkpoint.folder / _MODELOPT_FILE).is_file():
        stated.append(_dict(read_json(checkpoint.folder / _MODELOPT_FILE).get("quantization")))
    found = {str(v["kv_cache_quant_algo"]).upper() for v in stated if v.get("kv_cache_quant_algo")}
    schemes = [value.get("kv_cache_scheme") for value in stated]
    found |= {scheme.upper() for scheme in schemes if isinstance(scheme, str)}
    for scheme in map(_dict, schemes):
        if scheme.get("dynamic"):
            found.add("DYNAMIC")
        elif scheme:
            kind = "FP" if scheme.get("type") == "float" else "INT"
            found.add(f"{kind}{scheme.get('num_bits')}")
    return found


_REMEDY = "start from the unquantised model"


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"The {place} of the checkpoint is no JSON object: {_REMEDY}.")
    return value


def _found(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The declarations with their paths."""
    levels: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), config)]
    levels += [
        ((name,), level)
        for name, level in config.items()
        if name.endswith("_config") and name not in _KEYS and isinstance(level, dict)
    ]
    for path, level in levels:
        for key in _KEYS:
            if level.get(key) is not None:
                yield (*path, key), _mapping(level[key], key)


def _check(quantization: dict[str, Any]) -> None:
    method = quantization.get("quant_method")
    if method is not None and str(method) not in _METHODS:
        raise _unsupported(str(method))
    groups = _groups(quantization)
    formats = [quantization.get("format"), *(group.get("format") for group in groups)]
    formats.append(_dict(quantization.get("sparsity_config")).get("format"))
    layers = _dicts(quantization.get("quantized_layers"))
    algorithms = [quantization.get("quant_algo"), *(layer.get("quant_algo") for layer in layers)]
    unknown = [str(name) for name in formats if name and str(name) not in _FORMATS]
    # ModelOpt writes FP8_PB_WO in small letters.
    unknown += [str(n) for n in algorithms if n and str(n).upper() not in _ALGORITHMS]
    if unknown:
        raise _unsupported(f"{method} {unknown[0]}" if method else unknown[0])
    if any(location not in _OFFLINE for location in _rotations(quantization)):
        raise UnsupportedError(
            "The checkpoint is quantised under rotations that are undone while the model runs "
            f"(transform_config), so its weights are not the model's: {_REMEDY}."
        )


def _unsupported(kind: str) -> UnsupportedError:
    return UnsupportedError(
        f"The checkpoint is quantised with {kind}, which cannot be read as float: {_REMEDY}."
    )


def _dict(value: Any) -> dict[str, Any]:
    """An entry that may be missing, null or, in a file of unknown make, anything."""
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [_dict(entry) for entry in _dict(value).values()]


def _groups(scheme: dict[str, Any]) -> list[dict[str, Any]]:
    return _dicts(scheme.get("config_groups"))


def _rotations(quantization: dict[str, Any]) -> Iterator[str]:
    """Where the rotations of compressed-tensors' transform_config are applied."""
    for scheme in _groups(_dict(quantization.get("transform_config"))):
        for place in scheme.get("apply") or ():
            yield str(_dict(place).get("location"))


def _blocks(quantization: dict[str, Any], place: str) -> Iterator[tuple[int, int]]:
    """The FP8 block sizes: weight_block_size of quant_method fp8, and those of the groups of
    compressed-tensors, in old files as a text."""
    values = [quantization.get("weight_block_size")]
    for group in _groups(quantization):
        values.append(_dict(group.get("weights")).get("block_structure"))
    for value in values:
        if value is None:
            continue
        sizes = value.split("x") if isinstance(value, str) else value
        try:
            rows, columns = (int(size) for size in sizes)
        except (TypeError, ValueError):
            rows = columns = 0
        if min(rows, columns) < 1:
            raise CheckpointError(
                f"{place} in config.json gives {value!r} where the rows and columns of an FP8 "
                "block belong: correct it, [128, 128] is usual."
            )
        yield rows, columns
