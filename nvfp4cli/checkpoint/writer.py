"""Output shards whose complete header is known before the first tensor is computed.

Each shard is written under a temporary name, filled in any order, and renamed when its last byte
is on disk. So a killed run leaves only complete shards under final names, and memory never holds
a shard.
"""

import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvfp4cli.checkpoint.files import INDEX, SINGLE
from nvfp4cli.checkpoint.reader import DTYPE_NAMES
from nvfp4cli.errors import CheckpointError

PARTIAL = ".partial"


@dataclass(frozen=True)
class Output:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One output file: its tensors in file order, their offsets, and its header."""

    file: str
    outputs: tuple[Output, ...]
    offsets: dict[str, int]  # from the start of the file
    header: bytes
    size: int


def make_shards(
    units: Sequence[Sequence[Output]],
    max_bytes: int | None,
    metadata: Callable[[list[int]], dict[str, str]],
) -> list[Shard]:
    """Deal units of tensors into files of at most `max_bytes` of data, in order.

    units: the tensors of one weight (codes, scales), which stay in one file. metadata: from the
    numbers of the units in a file to the entries of its header's __metadata__.
    """
    filled: list[list[int]] = [[]]
    used = 0
    for number, unit in enumerate(units):
        size = sum(output.nbytes for output in unit)
        if filled[-1] and max_bytes is not None and used + size > max_bytes:
            filled.append([])
            used = 0
        filled[-1].append(number)
        used += size
    names = [SINGLE]
    if len(filled) > 1:
        n = len(filled)
        names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    return [
        _shard(name, [output for number in numbers for output in units[number]], metadata(numbers))
        for name, numbers in zip(names, filled, strict=True)
    ]


def _shard(file: str, outputs: list[Output], metadata: dict[str, str]) -> Shard:
    # The widest types first, as the safetensors library orders them, keeps every tensor aligned.
    ordered = sorted(outputs, key=lambda o: -o.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    starts = {}
    for output in ordered:
        starts[output.name] = position
        header[output.name] = {
            "dtype": DTYPE_NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [position, position + output.nbytes],
        }
        position += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + offset for name, offset in starts.items()}
    return Shard(
        file, tuple(ordered), offsets, len(text).to_bytes(8, "little") + text, start + position
    )


class ShardWriter:
    """Writes shards into a folder. Safe to call from several threads."""

    def __init__(self, folder: Path, shards: Sequence[Shard], done: Iterable[str] = ()) -> None:
        """`done`: files that an earlier run published; tensors in them are not written again."""
        self._folder = folder
        self._shard_of = {output.name: shard for shard in shards for output in shard.outputs}
        self._left = {shard.file: shard.size - len(shard.header) for shard in shards}
        for file in done:
            self._left[file] = 0
        self._done = set(done)
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()
        for shard in shards:
            if self._left[shard.file] == 0 and shard.file not in self._done:
                self._descriptor(shard)
                self._publish(shard)  # every tensor in it is empty: there is nothing to wait for

    def wants(self, name: str) -> bool:
        """False for a tensor that lies in a shard published earlier."""
        return self._shard_of[name].file not in self._done

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor."""
        self.write_bytes(name, 0, tensor.detach().cpu().contiguous().reshape(-1))

    def write_bytes(self, name: str, start: int, data: Tensor) -> None:
        """Write a flat contiguous piece of a tensor, `start` bytes after its beginning.

        Publishes the shard once all its bytes have been written.
        """
        shard = self._shard_of[name]
        buffer = data.view(torch.uint8).numpy().data
        if not buffer:
            return  # its shard may be published already and must not be opened again
        fd = self._descriptor(shard)
        _write_at(fd, buffer, shard.offsets[name] + start)
        with self._lock:
            left = self._left[shard.file] = self._left[shard.file] - len(buffer)
        if left == 0:
            self._publish(shard)

    def _descriptor(self, shard: Shard) -> int:
        with self._lock:
            if shard.file not in self._open:
                path = self._folder / (shard.file + PARTIAL)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                self._open[shard.file] = fd
                _write_at(fd, memoryview(shard.header), 0)
                os.truncate(fd, shard.size)
            return self._open[shard.file]

    def _publish(self, shard: Shard) -> None:
        with self._lock:
            fd = self._open.pop(shard.file)
        os.fsync(fd)
        os.close(fd)
        path = self._folder / shard.file
        path.with_name(shard.file + PARTIAL).rename(path)

    def close(self) -> None:
        """Close what is open. Unfinished shards keep their temporary names."""
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()

    def finished(self) -> bool:
        """True once every shard has been published."""
        return not any(self._left.values())


def _write_at(fd: int, data: memoryview, position: int) -> None:
    """Write all of `data`; the operating system may take it in several pieces."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], position + done)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(path.name + PARTIAL)
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    temporary.rename(path)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file byte for byte so that it is there whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + PARTIAL)
    shutil.copyfile(source, temporary)
    temporary.rename(target)


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write model.safetensors.index.json; nothing for a single file."""
    if len(shards) == 1:
        return
    weight_map = {output.name: shard.file for shard in shards for output in shard.outputs}
    total = sum(output.nbytes for shard in shards for output in shard.outputs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_bytes(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def check_disk(folder: Path, needed: int) -> None:
    """Raise CheckpointError if the file system of `folder` has fewer than `needed` bytes free, or
    none at all."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    total, _, free = shutil.disk_usage(existing)
    if not total:  # /proc and the like
        raise CheckpointError(
            f"{existing} is on a file system that stores no files: choose another output folder."
        )
    if free < needed:
        raise CheckpointError(
            f"{existing} has {free / 1e9:.2f} GB free and this run writes {needed / 1e9:.2f} GB: "
            "free some space or choose another output folder."
        )
