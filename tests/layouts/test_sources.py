"""Checkpoints that are quantised already, read as the float model they stand for."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo, open_checkpoint
from nvfp4cli.formats import e2m1, mxfp4, nvfp4
from nvfp4cli.layouts import LAYOUTS
from nvfp4cli.layouts.record import Stored
from nvfp4cli.layouts.sources import Source, open_source

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NORM = {"model.norm.weight": torch.arange(1.0, 9.0).bfloat16()}


def saved(
    folder: Path, tensors: dict[str, Tensor], quantization: Any = None, **config: Any
) -> Checkpoint:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return open_checkpoint(folder)


def opened(
    folder: Path, tensors: dict[str, Tensor], quantization: Any = None, **config: Any
) -> Source:
    return open_source(saved(folder, tensors, quantization, **config))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> Tensor:
    return (random(*shape, seed=seed) * 100).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return (random(*shape, seed=seed).abs() * 0.01 + 0.001).to(dtype)


def spread(scale: Tensor, n: int, k: int, block: tuple[int, int] = (128, 128)) -> Tensor:
    """A scale for each value of [..., n, k], cropped at the edges."""
    rows = scale.float().repeat_interleave(block[0], dim=-2)[..., :n, :]
    return rows.repeat_interleave(block[1], dim=-1)[..., :k]


class Spy(Checkpoint):
    """Counts the bytes that are read."""

    def read_bytes(self, info: TensorInfo, start: int, stop: int) -> Tensor:
        COUNTED.append(stop - start)
        return super().read_bytes(info, start, stop)


COUNTED: list[int] = []


def spied(checkpoint: Checkpoint) -> Source:
    COUNTED.clear()
    spy = Spy(checkpoint.folder, checkpoint.config, checkpoint.tensors, checkpoint.metadata)
    source = open_source(spy)
    assert COUNTED == []  # headers only
    return source


def test_an_unquantised_checkpoint_is_its_own_source(tmp_path: Path) -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    tensors = {
        "a.weight": random(4, 6),
        "experts.up": random(3, 4, 6).half(),
        "attn.k_scale": torch.ones(1),  # a parameter like any other where nothing is quantised
        "attn.bias": mask,
        "altup.correct_output_scale": torch.ones(4),
    }
    source = opened(tmp_path, tensors)
    assert list(source.tensors) == sorted(tensors)
    assert source.quantization is None and source.drop_config_keys == () == source.auxiliary
    for name, tensor in tensors.items():
        found = source.tensors[name]
        assert found.stored and found.parts == (name,)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.nbytes == tensor.numel() * tensor.itemsize
        assert torch.equal(source.read(name), tensor) and source.read(name).dtype == tensor.dtype
        assert torch.equal(source.read_rows(name, 0, 1), tensor[:1])
        assert torch.equal(source.read_index(name, 0), tensor[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_fp8_blocks_are_multiplied_and_cropped(
    tmp_path: Path, dtype: torch.dtype, suffix: str
) -> None:
    weight, scale = fp8(200, 136), scales(2, 2, dtype=dtype)
    tensors = {"m.weight": weight, f"m.weight{suffix}": scale, **NORM}
    source = opened(tmp_path, tensors, FP8, torch_dtype="float16")
    assert list(source.tensors) == ["m.weight", "model.norm.weight"]
    tensor = source.tensors["m.weight"]
    assert not tensor.stored and tensor.parts == ("m.weight", f"m.weight{suffix}")
    assert (tensor.shape, tensor.dtype) == ((200, 136), torch.float16)
    assert tensor.nbytes == 200 * 136 + 4 * scale.itemsize
    assert source.quantization == "FP8, 128x128 blocks"
    assert source.drop_config_keys == (("quantization_config",),)
    expected = weight.float() * spread(scale, 200, 136)
    found = source.read("m.weight")
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    for start, stop in ((0, 200), (0, 1), (100, 130), (127, 128), (128, 129), (150, 200), (5, 5)):
        assert torch.equal(source.read_rows("m.weight", start, stop), expected[start:stop])
    assert torch.equal(source.read_index("m.weight", 199), expected[199])


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    exponents = torch.tensor([[120, 127], [100, 0]], dtype=torch.uint8)
    tensors = {
        "m.weight": fp8(129, 130),
        "m.weight_scale_inv": exponents.view(torch.float8_e8m0fnu),
    }
    source = opened(tmp_path, tensors, {**FP8, "scale_fmt": "ue8m0"})
    scale = torch.ldexp(torch.ones(2, 2), exponents.int() - 127)
    expected = tensors["m.weight"].float() * spread(scale, 129, 130)
    assert torch.equal(source.read("m.weight"), expected)


@pytest.mark.parametrize("block", [(32, 64), (1, 128), (256, 16)])
@pytest.mark.parametrize("declare", ["fp8", "compressed-tensors", "text"])
def test_the_block_size_is_the_declared_one(
    tmp_path: Path, block: tuple[int, int], declare: str
) -> None:
    n, k = 200, 136
    grid = (math.ceil(n / block[0]), math.ceil(k / block[1]))
    tensors = {"m.weight": fp8(n, k), "m.weight_scale": scales(*grid)}
    structure: Any = "x".join(map(str, block)) if declare == "text" else list(block)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
    quantization: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    if declare == "fp8":
        quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    source = opened(tmp_path, tensors, quantization)
    expected = tensors["m.weight"].float() * spread(tensors["m.weight_scale"], n, k, block)
    assert torch.equal(source.read("m.weight"), expected)
    assert torch.equal(source.read_rows("m.weight", 33, 190), expected[33:190])
    assert source.quantization == f"FP8, {block[0]}x{block[1]} blocks"


# Shape of the values, shape of the scale in the file, the same for broadcasting.
GRIDS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]] = {
    "scalar": ((12, 20), (), (1, 1), "per tensor"),
    "one": ((12, 20), (1,), (1, 1), "per tensor"),
    "rows": ((12, 20), (12, 1), (12, 1), "per channel"),
    "flat rows": ((12, 20), (12,), (12, 1), "per channel"),
    "one for all experts": ((3, 12, 20), (1,), (1, 1, 1), "per tensor"),
    "experts": ((3, 12, 20), (3,), (3, 1, 1), "per tensor"),
    "experts, 1": ((3, 12, 20), (3, 1), (3, 1, 1), "per tensor"),
    "experts, 1, 1": ((3, 140, 140), (3, 1, 1), (3, 1, 1), "per tensor"),
    "rows of experts": ((3, 12, 20), (3, 12, 1), (3, 12, 1), "per channel"),
    "columns of experts": ((3, 12, 20), (3, 1, 20), (3, 1, 20), "per channel"),
}


@pytest.mark.parametrize("case", GRIDS.values(), ids=GRIDS.keys())
def test_scales_of_tensors_rows_and_experts(tmp_path: Path, case: tuple) -> None:
    shape, stored, broadcast, label = case
    tensors = {"m.weight": fp8(*shape), "m.weight_scale": scales(*stored)}
    source = opened(tmp_path, tensors, {"quant_method": "compressed-tensors"})
    expected = tensors["m.weight"].float() * tensors["m.weight_scale"].view(broadcast)
    assert source.quantization == f"FP8, {label}"
    assert source.tensors["m.weight"].dtype == torch.bfloat16
    assert torch.equal(source.read("m.weight"), expected)
    assert torch.equal(source.read_rows("m.weight", 1, 3), expected[1:3])
    assert torch.equal(source.read_index("m.weight", 2), expected[2])


def test_modelopts_block_scales_have_four_axes(tmp_path: Path) -> None:
    tensors = {"m.weight": fp8(200, 256), "m.weight_scale": scales(2, 1, 2, 1)}
    source = opened(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"})
    scale = spread(tensors["m.weight_scale"].view(2, 2), 200, 256)
    assert torch.equal(source.read("m.weight"), tensors["m.weight"].float() * scale)


def test_e5m2_is_fp8_too(tmp_path: Path) -> None:
    tensors = {
        "m.weight": fp8(4, 6, dtype=torch.float8_e5m2),
        "m.weight_scale": torch.tensor(0.3),
    }
    source = opened(tmp_path, tensors, {"quant_method": "fp8"})
    expected = tensors["m.weight"].float() * tensors["m.weight_scale"]
    assert torch.equal(source.read("m.weight"), expected)


def test_an_fp8_expert_is_read_alone(tmp_path: Path) -> None:
    """Fused experts as transformers saves them: the scale is called <parameter>_scale_inv."""
    experts, n, k = 4, 150, 200
    tensors = {"e.up": fp8(experts, n, k), "e.up_scale_inv": scales(experts, 2, 2)}
    source = spied(saved(tmp_path, tensors, FP8))
    expected = tensors["e.up"].float() * spread(tensors["e.up_scale_inv"], n, k)
    for i in range(experts):
        COUNTED.clear()
        assert torch.equal(source.read_index("e.up", i), expected[i])
        assert sum(COUNTED) == n * k + 2 * 2 * 4
    COUNTED.clear()
    assert torch.equal(source.read("e.up"), expected)
    assert sum(COUNTED) == source.tensors["e.up"].nbytes == experts * (n * k + 16)


def test_fp8_rows_are_read_alone(tmp_path: Path) -> None:
    source = spied(
        saved(tmp_path, {"m.weight": fp8(300, 136), "m.weight_scale_inv": scales(3, 2)}, FP8)
    )
    source.read_rows("m.weight", 130, 140)
    assert sum(COUNTED) == 10 * 136 + 2 * 4  # one row of blocks


def test_activation_and_cache_scales_are_named_and_not_read(tmp_path: Path) -> None:
    names = (
        "l.mlp.experts.gate_up_proj_activation_scale",
        "l.attn.q_proj.input_scale",
        "l.attn.k_proj.k_scale",
        "l.attn.v_scale",
    )
    auxiliary = {name: torch.ones(1) for name in names}
    tensors = {"q.weight": fp8(4, 6), "q.weight_scale": torch.ones(1), **auxiliary, **NORM}
    source = spied(saved(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}))
    assert source.auxiliary == tuple(sorted(names))
    assert list(source.tensors) == ["model.norm.weight", "q.weight"]


def test_comfys_marker_is_no_tensor_of_the_model(tmp_path: Path) -> None:
    marker = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    tensors = {"m.weight": fp8(4, 6), "m.weight_scale": torch.ones(()), "m.comfy_quant": marker}
    source = opened(tmp_path, tensors)
    assert list(source.tensors) == ["m.weight"] and source.auxiliary == ()
    assert source.drop_config_keys == ()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": "auto"}, torch.bfloat16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({"dtype": "float32", "text_config": {"dtype": "float16"}}, torch.float32),
    ],
)
def test_the_dtype_comes_from_the_configuration(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype
) -> None:
    tensors = {"m.weight": fp8(4, 6), "m.weight_scale": torch.ones(1)}
    assert opened(tmp_path, tensors, FP8, **config).tensors["m.weight"].dtype == dtype


def test_a_wrapper_declares_one_level_down(tmp_path: Path) -> None:
    tensors = {"m.weight": fp8(64, 64), "m.weight_scale_inv": scales(2, 4)}
    text = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16]}}
    source = opened(tmp_path, tensors, text_config=text)
    assert source.drop_config_keys == (("text_config", "quantization_config"),)
    expected = tensors["m.weight"].float() * spread(tensors["m.weight_scale_inv"], 64, 64, (32, 16))
    assert torch.equal(source.read("m.weight"), expected)


def mxfp4_experts(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales and the float values [experts, columns, rows], decoded one by one."""
    generator = torch.Generator().manual_seed(7)
    groups = columns // 32
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator)
    bytes_ = torch.randint(100, 140, (experts, rows, groups), generator=generator)
    values = torch.empty(experts, columns, rows)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for e in range(experts):
        for row in range(rows):
            for column in range(columns):
                group, place = divmod(column, 32)
                byte = int(blocks[e, row, group, place // 2])
                code = byte >> 4 if place % 2 else byte & 15
                sign = -1 if code & 8 else 1
                scale = 2.0 ** (int(bytes_[e, row, group]) - 127)
                values[e, column, row] = sign * table[code & 7] * scale
    return blocks.to(torch.uint8), bytes_.to(torch.uint8), values


def test_gpt_oss_experts(tmp_path: Path) -> None:
    up_blocks, up_scales, up = mxfp4_experts(3, 12, 64)
    down_blocks, down_scales, down = mxfp4_experts(3, 64, 32)
    base = "model.layers.0.mlp.experts"
    bias = random(3, 12).bfloat16()
    tensors = {
        f"{base}.gate_up_proj_blocks": up_blocks,
        f"{base}.gate_up_proj_scales": up_scales,
        f"{base}.gate_up_proj_bias": bias,
        f"{base}.down_proj_blocks": down_blocks,
        f"{base}.down_proj_scales": down_scales,
    }
    source = spied(saved(tmp_path, tensors, {"quant_method": "mxfp4"}))
    assert source.quantization == "MXFP4"
    expected = {f"{base}.gate_up_proj": up, f"{base}.down_proj": down}
    assert source.tensors.keys() == {*expected, f"{base}.gate_up_proj_bias"}
    assert source.tensors[f"{base}.gate_up_proj_bias"].stored
    for name, values in expected.items():
        tensor = source.tensors[name]
        assert (tensor.shape, tensor.dtype) == (values.shape, torch.bfloat16)
        assert tensor.parts == (f"{name}_blocks", f"{name}_scales")
        assert torch.equal(source.read(name), values)
        for i in range(3):
            COUNTED.clear()
            assert torch.equal(source.read_index(name, i), values[i])
            assert sum(COUNTED) == tensor.nbytes // 3
        assert torch.equal(source.read_rows(name, 1, 3), values[1:3])


def test_compressed_tensors_mxfp4(tmp_path: Path) -> None:
    weight = mxfp4.quantize(random(24, 96).bfloat16())
    tensors = {"m.weight_packed": weight.packed, "m.weight_scale": weight.block_scale}
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    source = opened(tmp_path, tensors, quantization)
    assert list(source.tensors) == ["m.weight"] and source.tensors["m.weight"].shape == (24, 96)
    assert source.tensors["m.weight"].nbytes == 24 * 48 + 24 * 3
    codes = e2m1.decode(e2m1.unpack(weight.packed))
    scale = torch.ldexp(torch.ones(24, 3), weight.block_scale.int() - 127)
    expected = codes * scale.repeat_interleave(32, dim=1)
    assert torch.equal(source.read("m.weight"), expected)
    assert torch.equal(source.read_rows("m.weight", 5, 9), expected[5:9])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_nvfp4_of_every_layout(tmp_path: Path, layout: Any) -> None:
    weight = random(40, 80).bfloat16()
    stored = Stored(nvfp4.quantize(weight, nvfp4.GlobalScale.from_amax(nvfp4.amax(weight))))
    tensors = {**layout.export("m", stored), **NORM}
    metadata = layout.header_metadata({"m": (40, 80)}, NORM, torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    (tmp_path / "config.json").write_text("{}")
    source = open_source(open_checkpoint(tmp_path))
    assert source.quantization == f"NVFP4, {layout.NAME}"
    assert list(source.tensors) == ["m.weight", "model.norm.weight"]
    tensor = source.tensors["m.weight"]
    assert tensor.shape == (40, 80) and set(tensor.parts) == set(tensors) - set(NORM)
    assert tensor.nbytes == sum(tensors[name].nbytes for name in tensor.parts)
    expected = nvfp4.dequantize(stored.weight)
    assert torch.equal(source.read("m.weight"), expected)
    assert torch.equal(source.read_rows("m.weight", 3, 20), expected[3:20])


def test_formats_can_be_mixed(tmp_path: Path) -> None:
    weight = random(32, 64).bfloat16()
    packed = Stored(nvfp4.quantize(weight, nvfp4.GlobalScale.from_amax(nvfp4.amax(weight))))
    micro = mxfp4.quantize(weight)
    tensors = {
        **LAYOUTS["compressed-tensors"].export("a", packed),
        "b.weight": fp8(32, 64),
        "b.weight_scale": scales(32, 1, dtype=torch.bfloat16),
        "c.weight_packed": micro.packed,
        "c.weight_scale": micro.block_scale,
    }
    groups = {"0": {"format": "nvfp4-pack-quantized"}, "1": {"format": "float-quantized"}}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
    }
    source = opened(tmp_path, tensors, quantization)
    assert source.quantization == "FP8, per channel + MXFP4 + NVFP4, compressed-tensors"
    assert list(source.tensors) == ["a.weight", "b.weight", "c.weight"]
    expected = tensors["b.weight"].float() * tensors["b.weight_scale"].float()
    assert torch.equal(source.read("b.weight"), expected)
    assert torch.equal(source.read("c.weight"), mxfp4.dequantize(micro))
