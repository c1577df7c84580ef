"""A checkpoint folder: headers validated up front, tensor data read lazily and in pieces.

The safetensors format is 8 bytes of little-endian header length, a JSON header, then the data
(https://github.com/huggingface/safetensors#format). Data is read with `preadv` into fresh memory
instead of being mapped: mapped pages count as resident and would make a bounded run look, and
under a memory limit behave, as large as the model.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from nvfp4cli.checkpoint.files import (
    CHANNELS,
    CONFIG,
    INDEX,
    RECORD,
    SINGLE,
    WEIGHT_SUFFIXES,
    no_weights,
)
from nvfp4cli.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

ADAPTER = "adapter_config.json"  # without its weights, which are not the model's, it misleads

_MAX_HEADER = 100_000_000  # the limit of the safetensors library
# Files that describe an earlier quantisation; carried over they would contradict the new weights.
_QUANTIZATION_FILES = {
    "hf_quant_config.json", "quantize_config.json", "quant_config.json", "recipe.yaml", RECORD,
    CHANNELS,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes from offset `start` of `file` in the folder."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.nbytes // self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose headers have been read and found consistent. No tensor data is held."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    metadata: dict[str, dict[str, str]]  # file -> its header's __metadata__

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """The whole tensor `name` on the CPU, in its stored dtype and shape."""
        info = self.tensors[name]
        return self.read_bytes(info, 0, info.nbytes).view(info.dtype).reshape(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis of tensor `name`."""
        info = self.tensors[name]
        row = math.prod(info.shape[1:]) * info.dtype.itemsize
        data = self.read_bytes(info, start * row, stop * row)
        return data.view(info.dtype).reshape(stop - start, *info.shape[1:])

    def read_bytes(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) of a tensor as uint8."""
        data = torch.empty(stop - start, dtype=torch.uint8)
        buffer = data.numpy().data
        with (self.folder / info.file).open("rb", buffering=0) as f:
            done = 0
            while done < len(buffer):
                got = os.preadv(f.fileno(), [buffer[done:]], info.start + start + done)
                if got == 0:
                    raise CheckpointError(
                        f"{info.file} ended while {info.name} was read: the file was truncated "
                        "after the run began; restore it and start again."
                    )
                done += got
        return data


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json and every safetensors header of `folder` and check that they agree.

    Raises CheckpointError naming file and tensor for anything that would fail or go wrong later.
    """
    config = read_json(folder / CONFIG)
    weight_map = _weight_map(folder)
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, dict[str, str]] = {}
    for file in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
        metadata[file], infos = _read_header(folder, file)
        for info in infos:
            if info.name in tensors:
                raise CheckpointError(
                    f"Tensor {info.name} is in both {tensors[info.name].file} and {file}: "
                    "remove one of them."
                )
            if weight_map and weight_map.get(info.name) != file:
                listed = weight_map.get(info.name, "nowhere")
                raise CheckpointError(
                    f"{file} holds {info.name}, which {INDEX} lists {_place(listed)}: the "
                    f"index is stale; {_remedy(folder, 'the checkpoint')}."
                )
            tensors[info.name] = info
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            raise CheckpointError(
                f"{INDEX} lists {name} in {file}, which does not hold it: "
                f"{_remedy(folder, 'that file')}."
            )
    return Checkpoint(folder, config, tensors, metadata)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises CheckpointError if it is missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: name a folder that holds a Hugging Face checkpoint."
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): {_remedy(path.parent, 'it')}."
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object: {_remedy(path.parent, 'it')}.")
    return value


def _remedy(folder: Path, what: str) -> str:
    """The next step where a file of the checkpoint is damaged."""
    if (folder / RECORD).is_file():
        return "write the checkpoint again with `nvfp4 quantize`"
    return f"download {what} again"


def sidecars(folder: Path) -> Iterator[str]:
    """Relative names of the files that accompany the weights and do not depend on them.

    Tokenizer, chat template, generation config, remote code, licence, in subfolders too; without
    config.json, weights of any format, their indexes and the files of an earlier quantisation.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and _is_sidecar(name):
            yield name.as_posix()


def _is_sidecar(name: PurePath) -> bool:
    return not (
        name.suffix in WEIGHT_SUFFIXES
        or name.name == ADAPTER
        or name.name.endswith(".index.json")
        or name.name in _QUANTIZATION_FILES
        or name == PurePath(CONFIG)
        or name.parts[0] == "original"
    )


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The index's tensor -> file map, or None for a single file."""
    if not (folder / INDEX).exists():
        if (folder / SINGLE).exists():
            return None
        raise CheckpointError(no_weights(str(folder), [path.name for path in folder.iterdir()]))
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map: {_remedy(folder, 'it')}.")
    for name, file in weight_map.items():
        inside = isinstance(file, str) and file and "\\" not in file
        path = PurePosixPath(file) if inside else PurePosixPath("..")
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                f"{INDEX} puts {name} into {file!r}, outside the checkpoint's folder: do not "
                "use this checkpoint."
            )
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{file}, which holds {name}, is missing from {folder}: {_remedy(folder, 'it')}."
            )
    return weight_map


def _place(file: str) -> str:
    return file if file == "nowhere" else f"in {file}"


def _read_header(folder: Path, file: str) -> tuple[dict[str, str], list[TensorInfo]]:
    path = folder / file
    remedy = _remedy(folder, "it")
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            raw = f.read(length) if 8 + length <= size and length <= _MAX_HEADER else None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): make it readable, or copy it."
        ) from None
    if raw is None or size < 8:
        raise CheckpointError(f"{file} is not a complete safetensors file: {remedy}.")
    try:
        header = json.loads(raw, object_pairs_hook=lambda pairs: _unique(pairs, file, remedy))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {file} is damaged ({error}): {remedy}.") from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"The header of {file} is no safetensors header: {remedy}.")
    infos = [_tensor_info(name, entry, file, 8 + length, remedy) for name, entry in header.items()]
    _check_ranges(infos, file, 8 + length, size, remedy)
    return metadata, infos


def _unique(pairs: list[tuple[str, Any]], file: str, remedy: str) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{file} names {twice} twice: {remedy}.")
    return entries


def _tensor_info(name: str, entry: Any, file: str, data_start: int, remedy: str) -> TensorInfo:
    try:
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        dtype = DTYPES[entry["dtype"]]
        if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{file} describes {name} as {entry}, which this version cannot read: "
            "save the checkpoint again with a current safetensors."
        ) from None
    nbytes = math.prod(shape) * dtype.itemsize
    if end - start != nbytes:
        raise CheckpointError(
            f"{file} gives {name} {end - start} bytes, but shape {list(shape)} of "
            f"{entry['dtype']} takes {nbytes}: {remedy}."
        )
    return TensorInfo(name, file, dtype, shape, data_start + start, end - start)


def _check_ranges(infos: list[TensorInfo], file: str, start: int, size: int, remedy: str) -> None:
    """Tensors must fill the file without gap or overlap, and the file must end with the last."""
    position = start
    for info in sorted(infos, key=lambda i: (i.start, i.nbytes)):
        if info.start != position:
            raise CheckpointError(
                f"The bytes of {info.name} in {file} begin at {info.start} instead of "
                f"{position}: {remedy}."
            )
        position += info.nbytes
    if position != size:
        raise CheckpointError(
            f"{file} has {size} bytes where its header promises {position}: {remedy}."
        )
