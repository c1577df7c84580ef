"""What cannot be read as float says so in one sentence, which ends with the next step."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import CheckpointError, Nvfp4Error, UnsupportedError, WeightError
from nvfp4cli.layouts.sources import Source, open_source

E4M3 = torch.float8_e4m3fn
BYTES = torch.uint8
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
STEPS = ("start from the unquantised model.", "is wrong.", "[128, 128] is usual.")


def opened(
    folder: Path, tensors: dict[str, Tensor], quantization: Any = None, **config: Any
) -> Source:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return open_source(open_checkpoint(folder))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(math.prod(shape) * dtype.itemsize, dtype=BYTES).view(dtype).view(shape)


def check_sentence(error: Nvfp4Error) -> None:
    text = str(error)
    assert text.endswith(STEPS) and ": " in text
    assert "torch." not in text and "\n" not in text
    assert len(re.findall(r"\.(?: |$)", text)) == 1, text


def refused(
    folder: Path, kind: type[Nvfp4Error], words: str, tensors: dict[str, Tensor], **config: Any
) -> None:
    with pytest.raises(kind, match=words) as caught:
        opened(folder, tensors, **config)
    assert type(caught.value) is kind
    check_sentence(caught.value)


WEIGHT = {"m.weight": zeros(200, 136, dtype=E4M3)}


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("quantization", [None, FP8])
def test_fp8_without_a_scale(tmp_path: Path, dtype: torch.dtype, quantization: Any) -> None:
    words = r"m\.weight in model\.safetensors is float8_\w+ \[4, 6\] without a scale, there is no "
    words += r"m\.weight_scale_inv or m\.weight_scale"
    tensors = {"m.weight": zeros(4, 6, dtype=dtype), "m.scale": torch.ones(1)}
    refused(tmp_path, CheckpointError, words, tensors, quantization=quantization)


def test_fp8_with_two_scales(tmp_path: Path) -> None:
    tensors = {"m.weight_scale": torch.ones(1), "m.weight_scale_inv": torch.ones(1), **WEIGHT}
    with pytest.raises(CheckpointError, match=r"two scales, m\.weight_scale_inv and"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize(
    "shape",
    [(2,), (1, 136), (2, 1), (1, 2), (3, 2), (136,), (136, 200), (2, 2, 1), (2, 2, 2, 2), (0,)],
)
def test_fp8_with_a_scale_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    words = rf"m\.weight_scale_inv in model\.safetensors is float32 {re.escape(str(list(shape)))}, "
    words += r"which is no scale of m\.weight, float8_e4m3fn \[200, 136\], .* blocks of 128x128"
    tensors = {"m.weight_scale_inv": torch.ones(shape), **WEIGHT}
    refused(tmp_path, CheckpointError, words, tensors, quantization=FP8)


def test_experts_with_the_rows_of_one(tmp_path: Path) -> None:
    for shape in ((12,), (12, 1), (20,), (2, 12, 1)):
        tensors = {"e.up": zeros(3, 12, 20, dtype=E4M3), "e.up_scale": torch.ones(shape)}
        refused(tmp_path, CheckpointError, "is no scale of e.up", tensors)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.uint8])
def test_fp8_with_a_scale_of_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"m.weight_scale_inv": torch.ones(2, 2, dtype=dtype), **WEIGHT}
    refused(tmp_path, CheckpointError, "is no scale of m.weight", tensors)


@pytest.mark.parametrize("shape", [(8,), (2, 2, 2, 2)])
def test_fp8_that_is_no_matrix(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {"m.weight": zeros(*shape, dtype=E4M3), "m.weight_scale": torch.ones(1)}
    refused(tmp_path, CheckpointError, "is no scale of m.weight", tensors)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    scale = torch.ones(2, 2)
    scale[1, 0] = value
    source = opened(tmp_path, {"m.weight_scale_inv": scale, **WEIGHT}, FP8)
    source.read_rows("m.weight", 0, 128)  # the good blocks
    words = r"m\.weight_scale_inv in model\.safetensors holds 1 scale that is not positive"
    with pytest.raises(WeightError, match=words) as caught:
        source.read("m.weight")
    check_sentence(caught.value)


def test_a_nan_among_powers_of_two(tmp_path: Path) -> None:
    scale = torch.full((2, 2), 255, dtype=BYTES).view(torch.float8_e8m0fnu)
    source = opened(tmp_path, {"m.weight_scale_inv": scale, **WEIGHT}, FP8)
    with pytest.raises(WeightError, match="holds 4 scales that are not positive and finite"):
        source.read("m.weight")


EXPERTS = {
    "e.up_blocks": zeros(2, 4, 3, 16, dtype=BYTES),
    "e.up_scales": zeros(2, 4, 3, dtype=BYTES),
}
PACKED = {"m.weight_packed": zeros(4, 48, dtype=BYTES), "m.weight_scale": zeros(4, 3, dtype=BYTES)}


@pytest.mark.parametrize("good", [EXPERTS, PACKED], ids=["gpt-oss", "compressed-tensors"])
def test_mxfp4_with_a_broken_scale(tmp_path: Path, good: dict[str, Tensor]) -> None:
    codes, scale = good
    opened(tmp_path, good)
    for broken in (good[scale].float(), good[scale][..., :2], good[scale][:1], good[scale][0]):
        refused(tmp_path, CheckpointError, "are no MXFP4 weight", {**good, scale: broken})
    refused(tmp_path, CheckpointError, "are no MXFP4 weight", {**good, codes: good[codes][..., :8]})
    refused(tmp_path, CheckpointError, f"no {scale} beside it", {codes: good[codes]})
    nan = good[scale].clone()
    nan.view(-1)[5] = 255
    source = opened(tmp_path, {**good, scale: nan})
    with pytest.raises(WeightError, match=f"{scale} in .* holds 1 scale that is NaN") as caught:
        source.read(next(iter(source.tensors)))
    check_sentence(caught.value)


def test_codes_without_their_blocks(tmp_path: Path) -> None:
    refused(tmp_path, UnsupportedError, "e.up_scales", {"e.up_scales": EXPERTS["e.up_scales"]})


def test_nvfp4_that_lacks_a_part(tmp_path: Path) -> None:
    tensors = {"m.weight": zeros(4, 8, dtype=BYTES), "m.weight_scale_2": torch.ones(())}
    with pytest.raises(CheckpointError, match=r"lacks m\.weight_scale"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize(
    "scale",
    [
        {"m.weight_scale": torch.ones(1)},
        {"m.weight_scale_inv": torch.ones(1)},
        {"m.weight_global_scale": torch.ones(1)},
        {"m.anything": zeros(2, 2, dtype=torch.float8_e8m0fnu)},
    ],
    ids=["scale", "inv", "global", "e8m0"],
)
def test_a_scale_beside_a_float_weight(tmp_path: Path, scale: dict[str, Tensor]) -> None:
    name = next(iter(scale))
    refused(
        tmp_path, CheckpointError, f"{name} in .* stands", {"m.weight": torch.ones(4, 6), **scale}
    )
    refused(tmp_path, CheckpointError, f"{name} in .* stands alone", scale)


def test_a_weight_that_is_stored_twice(tmp_path: Path) -> None:
    tensors = {"m.weight": torch.ones(4, 96), **PACKED}
    words = "m.weight is stored twice, once as m.weight_packed and m.weight_scale"
    refused(tmp_path, CheckpointError, words, tensors)
    renamed = {name.replace("e.up", "m.weight"): tensor for name, tensor in EXPERTS.items()}
    refused(tmp_path, CheckpointError, "m.weight is stored twice", {**PACKED, **renamed})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)])
def test_integers(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    words = rf"m\.weight in .* is u?int8 {re.escape(str(list(shape)))}, integers"
    refused(tmp_path, UnsupportedError, words, {"m.weight": torch.ones(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m.qweight", "GPTQ or AWQ"),
        ("m.weight_shape", "packed integers"),
        ("m.weight_zero_point", "zero points"),
        ("m.pre_quant_scale", "AWQ"),
        ("m.svdquant_lora_a", "SVDQuant"),
        ("m.weight.absmax", "bitsandbytes"),
        ("m.SCB", "bitsandbytes"),
    ],
)
def test_parts_of_other_quantisations(tmp_path: Path, name: str, kind: str) -> None:
    words = f"{name} in model.safetensors is part of a weight quantised with {kind}"
    refused(tmp_path, UnsupportedError, words, {name: torch.ones(4)})


def transform(location: str) -> dict[str, Any]:
    apply = [{"targets": ["Linear"], "location": location}]
    return {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}


COMPRESSED = {"quant_method": "compressed-tensors"}
OTHERS: dict[str, dict[str, Any]] = {
    "with gptq": {"quant_method": "gptq", "bits": 4},
    "with awq": {"quant_method": "awq"},
    "with bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "with mxfp8": {"quant_method": "mxfp8"},
    "with quark": {"quant_method": "quark"},
    "with compressed-tensors pack-quantized": {**COMPRESSED, "format": "pack-quantized"},
    "with compressed-tensors int-quantized": {
        **COMPRESSED,
        "format": "mixed-precision",
        "config_groups": {"group_0": {"format": "int-quantized"}},
    },
    "with compressed-tensors sparse-24-bitmask": {
        **COMPRESSED,
        "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "with modelopt NVFP4_AWQ": {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
    "with modelopt INT4_AWQ": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "INT4_AWQ"}},
    },
    "under rotations": {**COMPRESSED, "transform_config": transform("input")},
}


@pytest.mark.parametrize("words", OTHERS)
def test_other_methods_by_name(tmp_path: Path, words: str) -> None:
    refused(tmp_path, UnsupportedError, words, {"a": torch.ones(1)}, quantization=OTHERS[words])
    text = {"quantization_config": OTHERS[words]}
    refused(tmp_path, UnsupportedError, words, {"a": torch.ones(1)}, text_config=text)


def test_rotations_that_are_folded_do_no_harm(tmp_path: Path) -> None:
    quantization = {**COMPRESSED, "transform_config": transform("weight_output")}
    assert opened(tmp_path, {"a": torch.ones(1)}, quantization).quantization is None


def test_a_method_in_modelopts_own_file(tmp_path: Path) -> None:
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    refused(tmp_path, UnsupportedError, "with modelopt W4A8_AWQ", {"a": torch.ones(1)})
    opened(tmp_path, {"a": torch.ones(1)}, FP8)  # config.json is the newer of the two
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert opened(tmp_path, {"a": torch.ones(1)}).drop_config_keys == ()
    path.write_text(json.dumps({"quantization": "FP8"}))
    refused(
        tmp_path, CheckpointError, "hf_quant_config.json .* no JSON object", {"a": torch.ones(1)}
    )


@pytest.mark.parametrize("size", [[128], [128, 0], [128, "x"], 128, "128", "128x"])
def test_a_malformed_block_size(tmp_path: Path, size: Any) -> None:
    words = f"gives {re.escape(repr(size))} where the rows and columns"
    quantization = {"quant_method": "fp8", "weight_block_size": size}
    refused(tmp_path, CheckpointError, words, {"a": torch.ones(1)}, quantization=quantization)


def test_blocks_of_two_sizes(tmp_path: Path) -> None:
    groups = {str(n): {"weights": {"block_structure": [n, 128]}} for n in (64, 128)}
    quantization = {**COMPRESSED, "config_groups": groups}
    words = "blocks of 64x128 and 128x128"
    refused(tmp_path, UnsupportedError, words, {"a": torch.ones(1)}, quantization=quantization)


def test_a_declaration_that_is_none(tmp_path: Path) -> None:
    words = "quantization_config of the checkpoint is no JSON object"
    refused(tmp_path, CheckpointError, words, {"a": torch.ones(1)}, quantization="fp8")
