"""Shards as the safetensors library reads them, and when they get their final names."""

import json
import os
import random
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from nvfp4cli.checkpoint import writer
from nvfp4cli.checkpoint.files import INDEX, SINGLE
from nvfp4cli.checkpoint.reader import DTYPES, open_checkpoint
from nvfp4cli.checkpoint.writer import PARTIAL, Output, Shard, ShardWriter, make_shards
from nvfp4cli.errors import CheckpointError

F8 = torch.float8_e4m3fn
TENSORS = {
    "codes": torch.arange(24, dtype=torch.uint8).view(4, 6),
    "scale": torch.tensor([[0.5, 448.0], [2.0, 0.0]]).to(F8),
    "global": torch.tensor(0.25),
    "norm": torch.arange(5.0).bfloat16(),
    "empty": torch.zeros(0, 7),
    "ids": torch.tensor([2**60, -1]),
}


def outputs(tensors: dict[str, Tensor]) -> list[list[Output]]:
    """One unit for each tensor."""
    return [[Output(name, t.dtype, tuple(t.shape))] for name, t in tensors.items()]


def no_metadata(numbers: list[int]) -> dict[str, str]:
    return {}


def bytes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def write_all(shards: ShardWriter, tensors: dict[str, Tensor], names: Iterable[str]) -> None:
    for name in names:
        shards.write(name, tensors[name])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def vectors(count: int, size: int = 100) -> dict[str, Tensor]:
    return {f"t{i}": torch.full((size,), i, dtype=torch.uint8) for i in range(count)}


def test_the_library_reads_back_every_tensor_and_the_metadata(tmp_path: Path) -> None:
    shards = make_shards(outputs(TENSORS), None, lambda numbers: {"units": json.dumps(numbers)})
    assert [shard.file for shard in shards] == [SINGLE]
    out = ShardWriter(tmp_path, shards)
    write_all(out, TENSORS, reversed(TENSORS))
    out.close()
    assert files(tmp_path) == {SINGLE}
    assert (tmp_path / SINGLE).stat().st_size == shards[0].size
    assert bytes_of(load_file(tmp_path / SINGLE)) == bytes_of(TENSORS)
    with safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt", "units": "[0, 1, 2, 3, 4, 5]"}
        assert set(file.keys()) == set(TENSORS)
        assert file.get_slice("codes")[1:3].tolist() == TENSORS["codes"][1:3].tolist()


def test_every_dtype_is_aligned_and_read_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, (3 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        for name, dtype in DTYPES.items()
    }  # fmt: skip
    (shard,) = make_shards(outputs(tensors), None, no_metadata)
    for output in shard.outputs:
        assert shard.offsets[output.name] % output.dtype.itemsize == 0
    assert len(shard.header) % 8 == 0
    out = ShardWriter(tmp_path, [shard])
    write_all(out, tensors, tensors)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert bytes_of({name: checkpoint.read(name) for name in tensors}) == bytes_of(tensors)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, [5]),
        (500, [5]),
        (499, [4, 1]),
        (200, [2, 2, 1]),
        (199, [1, 1, 1, 1, 1]),
        (1, [1, 1, 1, 1, 1]),  # a unit is never split
    ],
)
def test_shards_hold_at_most_the_limit(limit: int | None, expected: list[int]) -> None:
    shards = make_shards(outputs(vectors(5)), limit, no_metadata)
    assert [len(shard.outputs) for shard in shards] == expected
    n = len(expected)
    names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    assert [shard.file for shard in shards] == (names if n > 1 else [SINGLE])


def test_the_parts_of_a_weight_stay_in_one_file() -> None:
    unit = [Output("codes", torch.uint8, (60,)), Output("scale", torch.uint8, (60,))]
    other = [Output("norm", torch.uint8, (60,))]
    seen: list[list[int]] = []

    def metadata(numbers: list[int]) -> dict[str, str]:
        seen.append(numbers)
        return {}

    shards = make_shards([other, unit, other], 130, metadata)
    assert [[o.name for o in s.outputs] for s in shards] == [["norm"], ["codes", "scale"], ["norm"]]
    assert seen == [[0], [1], [2]]


def test_index_is_exact(tmp_path: Path) -> None:
    tensors = {**TENSORS, **vectors(3)}
    shards = make_shards(outputs(tensors), 60, no_metadata)
    assert len(shards) > 2
    out = ShardWriter(tmp_path, shards)
    write_all(out, tensors, tensors)
    writer.write_index(tmp_path, shards)
    index = json.loads((tmp_path / INDEX).read_text())
    held = {}
    for shard in shards:
        held |= dict.fromkeys(load_file(tmp_path / shard.file), shard.file)
    assert index["weight_map"] == held
    assert list(index["weight_map"]) == sorted(tensors)
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors.values())}
    assert files(tmp_path) == {INDEX, *(shard.file for shard in shards)}
    (tmp_path / "config.json").write_text("{}")
    assert set(open_checkpoint(tmp_path).tensors) == set(tensors)


def test_no_index_for_a_single_file(tmp_path: Path) -> None:
    writer.write_index(tmp_path, make_shards(outputs(TENSORS), None, no_metadata))
    assert files(tmp_path) == set()


def pair(tmp_path: Path, done: Iterable[str] = ()) -> tuple[list[Shard], ShardWriter]:
    shards = make_shards(outputs(vectors(4)), 200, no_metadata)
    return shards, ShardWriter(tmp_path, shards, done)


def test_a_shard_gets_its_name_with_its_last_byte(tmp_path: Path) -> None:
    tensors = vectors(4)
    shards, out = pair(tmp_path)
    first, second = (shard.file for shard in shards)
    assert files(tmp_path) == set() and not out.finished()
    out.write("t0", tensors["t0"])
    out.write("t3", tensors["t3"])
    out.write_bytes("t1", 0, tensors["t1"][:99])
    assert files(tmp_path) == {first + PARTIAL, second + PARTIAL}
    out.write_bytes("t1", 99, tensors["t1"][99:])
    assert files(tmp_path) == {first, second + PARTIAL} and not out.finished()
    out.close()
    assert files(tmp_path) == {first, second + PARTIAL}
    assert bytes_of(load_file(tmp_path / first)) == bytes_of({n: tensors[n] for n in ("t0", "t1")})


def test_resuming_writes_only_what_is_missing(tmp_path: Path) -> None:
    tensors = vectors(4)
    shards, out = pair(tmp_path)
    write_all(out, tensors, ["t0", "t1", "t2"])
    out.close()
    first, second = (shard.file for shard in shards)
    assert files(tmp_path) == {first, second + PARTIAL}
    before = (tmp_path / first).stat()

    _, out = pair(tmp_path, done=[first])
    assert [out.wants(name) for name in tensors] == [False, False, True, True]
    write_all(out, tensors, ["t2", "t3"])
    assert out.finished() and files(tmp_path) == {first, second}
    after = (tmp_path / first).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert bytes_of(load_file(tmp_path / second)) == bytes_of({n: tensors[n] for n in ("t2", "t3")})


def test_what_a_killed_run_left_is_overwritten(tmp_path: Path) -> None:
    tensors = vectors(4)
    shards, out = pair(tmp_path)
    (tmp_path / (shards[0].file + PARTIAL)).write_bytes(b"\xff" * 5000)
    write_all(out, tensors, tensors)
    assert out.finished()
    assert (tmp_path / shards[0].file).stat().st_size == shards[0].size
    assert load_file(tmp_path / shards[0].file)["t1"].tolist() == [1] * 100


def test_a_shard_of_empty_tensors_is_published(tmp_path: Path) -> None:
    tensors = {"full": torch.ones(8), "none": torch.zeros(0, 16, dtype=F8)}
    shards = make_shards(outputs(tensors), 4, no_metadata)  # the second file begins with "none"
    first, second = (shard.file for shard in shards)
    out = ShardWriter(tmp_path, shards)
    assert files(tmp_path) == {second} and not out.finished()
    out.write("none", tensors["none"])
    assert files(tmp_path) == {second}
    out.write("full", tensors["full"])
    assert files(tmp_path) == {first, second} and out.finished()
    assert bytes_of(load_file(tmp_path / second)) == bytes_of({"none": tensors["none"]})
    assert ShardWriter(tmp_path, shards, done=[first, second]).finished()


def test_an_empty_tensor_written_last_leaves_the_shard_alone(tmp_path: Path) -> None:
    tensors = {"full": torch.arange(8.0), "empty": torch.zeros(0, 3)}
    out = ShardWriter(tmp_path, make_shards(outputs(tensors), None, no_metadata))
    write_all(out, tensors, ["full", "empty"])
    out.close()
    assert files(tmp_path) == {SINGLE}
    assert bytes_of(load_file(tmp_path / SINGLE)) == bytes_of(tensors)


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert ShardWriter(tmp_path, make_shards([], 100, no_metadata)).finished()
    assert load_file(tmp_path / SINGLE) == {}


def test_strides_and_devices_do_not_matter(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4).requires_grad_()
    tensors = {"t": matrix.t(), "every_second": matrix[:, ::2]}
    out = ShardWriter(tmp_path, make_shards(outputs(tensors), None, no_metadata))
    write_all(out, tensors, tensors)
    loaded = load_file(tmp_path / SINGLE)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_many_threads_write_the_same_files(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.rand(257, generator=generator) for i in range(60)}
    shards = make_shards(outputs(tensors), 5000, no_metadata)
    pieces = [(n, i) for n in tensors for i in range(0, 257, 64)]
    random.Random(0).shuffle(pieces)
    out = ShardWriter(tmp_path, shards)
    start = threading.Barrier(4)

    def work(mine: list[tuple[str, int]]) -> None:
        start.wait()
        for name, i in mine:
            out.write_bytes(name, i * 4, tensors[name][i : i + 64])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, pieces[i::4]) for i in range(4)]:
            future.result()
    assert out.finished() and files(tmp_path) == {shard.file for shard in shards}
    loaded = {}
    for shard in shards:
        loaded |= load_file(tmp_path / shard.file)
    assert bytes_of(loaded) == bytes_of(tensors)


def test_writes_that_the_system_takes_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:5], at))
    out = ShardWriter(tmp_path, make_shards(outputs(TENSORS), None, no_metadata))
    write_all(out, TENSORS, TENSORS)
    assert bytes_of(load_file(tmp_path / SINGLE)) == bytes_of(TENSORS)


def test_small_files_are_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "part" / "tokenizer.json"
    (tmp_path / "source").write_bytes(b"\x00\xffnew\r\n")
    writer.copy_file(tmp_path / "source", target)
    assert target.read_bytes() == b"\x00\xffnew\r\n"
    writer.write_bytes(target, "é\n".encode())
    assert target.read_bytes() == b"\xc3\xa9\n"
    assert files(target.parent) == {"tokenizer.json"}

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        writer.write_bytes(target, b"newer")
    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(OSError):
        writer.copy_file(tmp_path / "source", target)
    assert target.read_bytes() == b"\xc3\xa9\n"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_a_file_system_that_stores_no_files() -> None:
    with pytest.raises(CheckpointError, match=r"^/proc is on a file system that stores no files: "):
        writer.check_disk(Path("/proc/nowhere/out"), 1)


def test_too_little_disk(tmp_path: Path) -> None:
    writer.check_disk(tmp_path / "not" / "yet" / "made", 1000)
    writer.check_disk(Path("relative"), 1000)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path} has .* free and this run writes 10"):
        writer.check_disk(tmp_path / "not" / "yet" / "made", 10**19)
