"""What `open_checkpoint` reads, and everything it refuses, from files made by hand."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nvfp4cli.checkpoint.files import INDEX, RECORD, SINGLE
from nvfp4cli.checkpoint.reader import DTYPES, Checkpoint, open_checkpoint, read_json, sidecars
from nvfp4cli.errors import CheckpointError

Header = dict[str, Any]
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def entry(start: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> Header:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape,
            "data_offsets": [start, end]}  # fmt: skip


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file by the format's definition; a header given as bytes is taken as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def vector(name: str, size: int = 4) -> bytes:
    return file_of({name: entry(0, size)}, bytes(range(size)))


def folder_with(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in {"config.json": b'{"model_type": "llama"}', **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def sharded(folder: Path, weight_map: Any, files: dict[str, bytes] | None = None) -> Path:
    files = {A: vector("a"), B: vector("b")} if files is None else files
    return folder_with(folder, {INDEX: json.dumps({"weight_map": weight_map}).encode(), **files})


def refused(folder: Path, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(folder)


def single(folder: Path, content: bytes) -> Path:
    return folder_with(folder, {SINGLE: content})


# Reading


def stored(folder: Path) -> Checkpoint:
    tensors = {
        "matrix": torch.arange(24, dtype=torch.float32).view(6, 4).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 5, dtype=torch.float16),
        "cube": torch.arange(24, dtype=torch.int64).view(2, 3, 4),
        "flags": torch.tensor([True, False, True]),
        "eighth": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
    }
    folder_with(folder, {})
    save_file(tensors, folder / SINGLE, {"format": "pt", "note": "ours"})
    return open_checkpoint(folder)


def test_tensors_config_and_metadata(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.metadata == {SINGLE: {"format": "pt", "note": "ours"}}
    assert checkpoint.nbytes == 48 + 4 + 0 + 192 + 3 + 2
    matrix = checkpoint.tensors["matrix"]
    assert (matrix.dtype, matrix.shape, matrix.numel) == (torch.bfloat16, (6, 4), 24)
    assert checkpoint.tensors["scalar"].numel == 1 and checkpoint.tensors["empty"].numel == 0
    assert checkpoint.read("matrix").tolist()[5] == [20, 21, 22, 23]
    scalar, empty = checkpoint.read("scalar"), checkpoint.read("empty")
    assert scalar.shape == () and scalar.item() == 2.5
    assert empty.shape == (0, 5) and empty.dtype == torch.float16
    assert checkpoint.read("flags").tolist() == [True, False, True]
    assert checkpoint.read("eighth").float().tolist() == [0.5, -448.0]


def test_rows_and_bytes(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path)
    matrix = checkpoint.read("matrix")
    assert torch.equal(checkpoint.read_rows("matrix", 2, 5), matrix[2:5])
    assert torch.equal(checkpoint.read_rows("matrix", 0, 6), matrix)
    assert checkpoint.read_rows("matrix", 3, 3).shape == (0, 4)
    assert checkpoint.read_rows("empty", 0, 0).shape == (0, 5)
    assert torch.equal(checkpoint.read_rows("cube", 1, 2), checkpoint.read("cube")[1:])
    whole = matrix.view(torch.uint8).flatten()
    info = checkpoint.tensors["matrix"]
    assert torch.equal(checkpoint.read_bytes(info, 3, 20), whole[3:20])


def test_every_dtype_has_its_size(tmp_path: Path) -> None:
    position, header = 0, {}
    for name, dtype in DTYPES.items():
        header[name] = entry(position, position + 3 * dtype.itemsize, [3], name)
        position += 3 * dtype.itemsize
    checkpoint = open_checkpoint(single(tmp_path, file_of(header, bytes(position))))
    for name, dtype in DTYPES.items():
        tensor = checkpoint.read(name)
        assert tensor.dtype == dtype and tensor.shape == (3,)


def test_read_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may return less than was asked for, as it does above 2 GiB."""
    checkpoint = open_checkpoint(single(tmp_path, vector("a", 100)))
    whole = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert checkpoint.read("a").tolist() == list(range(100))


def test_truncation_after_the_headers_were_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(single(tmp_path, vector("a", 100)))
    os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{SINGLE} ended while a was read"):
        checkpoint.read("a")
    assert checkpoint.read_rows("a", 0, 99).tolist() == list(range(99))


def test_shards_in_subfolders_and_links_into_a_cache(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / "0123").write_bytes(vector("a"))
    snapshot = tmp_path / "snapshots" / "main"
    sharded(snapshot, {"a": A, "b": f"part/{B}"}, {f"part/{B}": vector("b")})
    (snapshot / A).symlink_to(blobs / "0123")
    checkpoint = open_checkpoint(snapshot)
    assert {name: info.file for name, info in checkpoint.tensors.items()} == {
        "a": A,
        "b": f"part/{B}",
    }
    assert checkpoint.read("a").tolist() == checkpoint.read("b").tolist() == [0, 1, 2, 3]


def test_no_metadata_and_a_padded_header(tmp_path: Path) -> None:
    text = json.dumps({"a": entry(0, 4), "z": entry(4, 4)}).encode() + b"   "
    checkpoint = open_checkpoint(single(tmp_path, file_of(text, b"abcd")))
    assert checkpoint.metadata == {SINGLE: {}} and set(checkpoint.tensors) == {"a", "z"}


# config.json


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (b"{", r"config\.json cannot be read .*: download it again"),
        (b"\xff\xfe{}", r"config\.json cannot be read"),
        (b"[]", r"config\.json is not a JSON object"),
        (b"[" * 100_000, r"config\.json cannot be read"),
    ],
)
def test_config_that_is_none(tmp_path: Path, config: bytes, sentence: str) -> None:
    refused(folder_with(tmp_path, {SINGLE: vector("a"), "config.json": config}), sentence)


def test_no_config(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(vector("a"))
    refused(tmp_path, rf"{tmp_path} has no config\.json: name a folder")
    refused(tmp_path / "gone", r"gone has no config\.json: name a folder")
    refused(tmp_path / SINGLE, "cannot be read")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path)


# No weights


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "no weights at all: give a checkpoint saved by transformers"),
        ({"model.gguf": b""}, r"only model\.gguf"),
        ({"consolidated.safetensors": b""}, r"only consolidated\.safetensors"),
        ({"pytorch_model.bin": b""}, r"pytorch_model\*\.bin only: convert .*save_pretrained"),
        (
            {"pytorch_model-00001-of-00002.bin": b"", "pytorch_model.bin.index.json": b"{}"},
            r"pytorch_model\*\.bin only",
        ),
    ],
)
def test_no_safetensors(tmp_path: Path, files: dict[str, bytes], sentence: str) -> None:
    refused(folder_with(tmp_path, files), sentence)


# The index


@pytest.mark.parametrize(
    "index", [b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"{", b"\x00"]
)
def test_index_without_a_weight_map(tmp_path: Path, index: bytes) -> None:
    folder_with(tmp_path, {INDEX: index, SINGLE: vector("a")})
    refused(tmp_path, rf"{INDEX} (has no weight_map|is not a JSON object|cannot be read)")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "part/../../x", "a\\b", "..", "", 3, None, ["x"]]
)
def test_index_that_points_outside(tmp_path: Path, file: Any) -> None:
    folder = sharded(tmp_path / "inside", {"a": A, "b": file})
    (tmp_path / "x.safetensors").write_bytes(vector("b"))
    refused(folder, rf"{INDEX} puts b into .*, outside the checkpoint's folder: do not use")


@pytest.mark.parametrize("file", ["gone.safetensors", ".", "part", "nul\0", "x" * 200])
def test_missing_shard(tmp_path: Path, file: str) -> None:
    (tmp_path / "part").mkdir()
    sharded(tmp_path, {"a": A, "b": file})
    refused(tmp_path, "which holds b, is missing from .*: download it again")


def test_dangling_link(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": A, "b": B}, {A: vector("a")})
    (tmp_path / B).symlink_to(tmp_path / "gone")
    refused(tmp_path, f"{B}, which holds b, is missing")


def test_stale_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"a": B, "b": B})
    refused(folder, f"lists a in {B}, which does not hold it")
    sharded(tmp_path, {"a": A, "b": A, "c": B})
    refused(folder, f"{B} holds b, which {INDEX} lists in {A}: the index is stale")
    sharded(tmp_path, {"a": A, "b": B, "c": B})
    refused(folder, f"{INDEX} lists c in {B}, which does not hold it")
    sharded(tmp_path, {"b": B, "c": A})
    refused(folder, f"{A} holds a, which {INDEX} lists nowhere: the index is stale")


def test_one_name_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": A, "b": B}, {A: vector("a"), B: file_of(
        {"a": entry(0, 4), "b": entry(4, 8)}, bytes(8))})  # fmt: skip
    refused(tmp_path, f"Tensor a is in both {A} and {B}: remove one of them")


def test_the_index_decides_where_both_forms_are_present(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": A, "b": B})
    (tmp_path / SINGLE).write_bytes(b"not a safetensors file")
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}


# Damaged files

GOOD = vector("a", 8)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, len(GOOD) - 9])
def test_file_that_ends_in_its_header(tmp_path: Path, size: int) -> None:
    refused(single(tmp_path, GOOD[:size]), f"{SINGLE} is not a complete safetensors file")


@pytest.mark.parametrize("data", [GOOD[:-1], GOOD[:-8], GOOD + b"x"])
def test_file_that_is_short_or_long(tmp_path: Path, data: bytes) -> None:
    refused(single(tmp_path, data), f"{SINGLE} has {len(data)} bytes where its header promises 7")


@pytest.mark.parametrize(
    "content",
    [
        b"<html>404 not found</html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
        b"\xff" * 64,
        (100_000_001).to_bytes(8, "little") + b"{}",
    ],
)
def test_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    refused(single(tmp_path, content), f"{SINGLE} is not a complete safetensors file")


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"\xff\xff",
        b"",
        b'{"a": NaN',
        b"[" * 100_000,
        b"[]",
        b"3",
        b"null",
        b'{"__metadata__": []}',
        b'{"__metadata__": {"format": 1}}',
    ],
)
def test_header_that_is_none(tmp_path: Path, header: bytes) -> None:
    refused(single(tmp_path, file_of(header)), rf"[Tt]he header of {SINGLE} is")


@pytest.mark.parametrize(
    "described",
    [
        entry(0, 4, dtype="F4"),
        {**entry(0, 4), "dtype": ["U8"]},
        {**entry(0, 4), "dtype": None},
        {**entry(0, 4), "shape": 4},
        {**entry(0, 4), "shape": "4"},
        {**entry(0, 4), "shape": [4.0]},
        {**entry(0, 4), "shape": [True, 4]},
        {**entry(0, 4), "shape": [-2, -2]},
        {**entry(0, 4), "data_offsets": ["0", "4"]},
        {**entry(0, 4), "data_offsets": [0.0, 4.0]},
        {**entry(0, 4), "data_offsets": [0, 2, 4]},
        {**entry(0, 4), "data_offsets": [-4, 0]},
        {**entry(0, 4), "data_offsets": 4},
        {"dtype": "U8", "shape": [4]},
        [0, 4],
        "U8",
        None,
    ],
)
def test_tensor_that_is_described_wrongly(tmp_path: Path, described: Any) -> None:
    content = file_of({"a": described}, bytes(4))
    refused(single(tmp_path, content), rf"{SINGLE} describes a as .*, which this version cannot")


def test_one_name_twice_in_a_header(tmp_path: Path) -> None:
    text = b'{"a":%b,"b":%b,"a":%b}' % tuple(json.dumps(entry(i, i + 1)).encode() for i in range(3))
    refused(single(tmp_path, file_of(text, bytes(3))), f"{SINGLE} names a twice")


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a": entry(0, 4, [5])}, r"gives a 4 bytes, but shape \[5\] of U8 takes 5"),
        ({"a": entry(0, 4, [4], "F32")}, r"gives a 4 bytes, but shape \[4\] of F32 takes 16"),
        ({"a": entry(4, 0, [0])}, "gives a -4 bytes"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, r"bytes of b in .* begin at \d+ instead of"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, r"bytes of b in .* begin at \d+ instead of"),
        ({"a": entry(0, 4), "b": entry(5, 9)}, r"bytes of b in .* begin at \d+ instead of"),
        ({"a": entry(1, 5)}, r"bytes of a in .* begin at \d+ instead of"),
        ({"a": entry(0, 4), "b": entry(2, 2)}, r"bytes of a|bytes of b"),
    ],
    ids=["shape", "dtype", "reversed", "overlap", "same", "gap", "late start", "empty inside"],
)
def test_byte_ranges_that_do_not_fit(tmp_path: Path, tensors: Header, sentence: str) -> None:
    end = max(described["data_offsets"][1] for described in tensors.values())
    refused(single(tmp_path, file_of(tensors, bytes(end))), sentence)


def test_a_file_named_twice_under_two_spellings(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": A, "b": f"./{A}"}, {A: file_of(
        {"a": entry(0, 4), "b": entry(4, 8)}, bytes(8))})  # fmt: skip
    refused(tmp_path, "the index is stale|is in both")


# Sidecars


def test_sidecars_are_what_does_not_depend_on_the_weights(tmp_path: Path) -> None:
    carried = {
        "LICENSE", "README.md", "chat_template.jinja", "generation_config.json",
        "modeling_mine.py", "tokenizer.json", "tokenizer.model", "vocab.txt",
        "additional_chat_templates/tool.jinja", "vision/config.json", "encoding/tables.bin.txt",
    }  # fmt: skip
    left = {
        SINGLE, INDEX, "config.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
        "model.gguf", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "rust_model.ot",
        "original/params.json", "original/consolidated.00.pth", "training_args.bin",
        "hf_quant_config.json", "quantize_config.json", "quant_config.json", "recipe.yaml",
        "nvfp4.yaml", ".gitattributes", ".cache/huggingface/download/x.json", ".nvfp4-run.json",
        "part/.hidden",
    }  # fmt: skip
    folder_with(tmp_path, dict.fromkeys(carried | left, b"x"))
    assert list(sidecars(tmp_path)) == sorted(carried)


def test_sidecars_follow_links_to_files(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"{}")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    (folder / "gone.json").symlink_to(tmp_path / "gone")
    assert list(sidecars(folder)) == ["tokenizer.json"]


def test_a_hidden_parent_folder_hides_nothing(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / ".cache" / "model", {"tokenizer.json": b"{}"})
    assert list(sidecars(folder)) == ["tokenizer.json"]


@pytest.mark.parametrize("content", [b"", file_of(b"{"), file_of([]), vector("a") + b"x"])
def test_what_this_tool_wrote_is_written_again(content: bytes, tmp_path: Path) -> None:
    folder = single(tmp_path, content)
    refused(folder, ": download it again")
    (folder / RECORD).write_text("nvfp4_version: 1\n")
    refused(folder, r": write the checkpoint again with `nvfp4 quantize`\.$")
