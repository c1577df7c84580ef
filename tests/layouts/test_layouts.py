"""Each layout against the canonical record: names, bytes, shapes, configuration."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.formats import swizzle
from nvfp4cli.formats.nvfp4 import GlobalScale, Quantized, amax, quantize
from nvfp4cli.layouts import LAYOUTS
from nvfp4cli.layouts.record import Contents, Layout, Shape, Stored
from nvfp4cli.recipe import LAYOUT_NAMES

# Whole tiles, hidden 80 with intermediate 208, SmolLM2's 576 rows, rows that comfy pads.
SHAPES = [(128, 64), (208, 80), (80, 208), (576, 576), (72, 32)]
W4A4 = [layout for layout in LAYOUTS.values() if layout.INPUT_SCALES]
CASE_5 = [6, 1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
CASE_5 += [-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5]


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


def record(shape: Shape, input_amax: float | None = None) -> Stored:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
    scale = None if input_amax is None else GlobalScale.from_amax(input_amax)
    return Stored(quantize(weight, GlobalScale.from_amax(amax(weight))), scale)


def assert_same(a: Stored, b: Stored) -> None:
    assert torch.equal(a.weight.packed, b.weight.packed)
    assert a.weight.block_scale.dtype == b.weight.block_scale.dtype
    assert torch.equal(bytes_of(a.weight.block_scale), bytes_of(b.weight.block_scale))
    assert a.weight.global_scale == b.weight.global_scale
    assert a.input_scale == b.input_scale


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_names_are_those_of_recipes(layout: Layout) -> None:
    assert tuple(LAYOUTS) == LAYOUT_NAMES
    assert "{out}" in layout.SERVE


@pytest.mark.parametrize("shape", SHAPES)
def test_exports_what_it_announces_and_loads_it_back(layout: Layout, shape: Shape) -> None:
    stored = record(shape)
    tensors = layout.export("a.b", stored)
    announced = {output.name: output for output in layout.outputs("a.b", shape, False)}
    assert tensors.keys() == announced.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (announced[name].dtype, announced[name].shape)
        assert tensor.is_contiguous() and tensor.nbytes == announced[name].nbytes
    assert_same(layout.load("a.b", shape, tensors.__getitem__, False), stored)


@pytest.mark.parametrize("layout", W4A4, ids=lambda layout: layout.NAME)
def test_input_scales(layout: Layout) -> None:
    shape = (32, 32)
    stored = record(shape, input_amax=11.5)
    tensors = layout.export("m", stored)
    announced = {output.name: output for output in layout.outputs("m", shape, True)}
    assert tensors.keys() == announced.keys()
    extra = announced.keys() - {output.name for output in layout.outputs("m", shape, False)}
    assert len(extra) == 1
    name = extra.pop()
    assert (tensors[name].dtype, tensors[name].shape) == (torch.float32, announced[name].shape)
    assert_same(layout.load("m", shape, tensors.__getitem__, True), stored)
    assert layout.load("m", shape, tensors.__getitem__, False).input_scale is None


def test_torchao_holds_no_input_scales() -> None:
    with pytest.raises(UnsupportedError, match="choose compressed-tensors or modelopt"):
        LAYOUTS["torchao"].outputs("m", (32, 32), True)


@pytest.mark.parametrize("shape", SHAPES)
def test_converting_through_every_layout_returns_the_same_bytes(shape: Shape) -> None:
    first = LAYOUTS["modelopt"].export("m", record(shape))
    tensors, last = first, "modelopt"
    for name in ("compressed-tensors", "comfy", "torchao", "modelopt"):
        stored = LAYOUTS[last].load("m", shape, tensors.__getitem__, False)
        tensors, last = LAYOUTS[name].export("m", stored), name
    assert tensors.keys() == first.keys()
    for name, tensor in first.items():
        assert tensors[name].shape == tensor.shape
        assert torch.equal(bytes_of(tensors[name].flatten()), bytes_of(tensor.flatten()))


def test_directions_of_the_global_scale() -> None:
    scale = GlobalScale.from_amax(3.0)
    q = Quantized(
        torch.zeros(16, 8, dtype=torch.uint8), torch.zeros(16, 1).to(torch.float8_e4m3fn), scale
    )
    found = {
        name: next(t for t in layout.export("m", Stored(q)).values() if t.dtype == torch.float32)
        for name, layout in LAYOUTS.items()
    }
    multiplier, divisor = torch.tensor(3.0) / 2688, torch.tensor(2688.0) / 3
    assert torch.equal(found["compressed-tensors"], divisor[None])
    for name in ("torchao", "modelopt", "comfy"):
        assert torch.equal(found[name], multiplier)


def test_nibbles_and_scale_of_one_block() -> None:
    weight = torch.tensor([CASE_5])
    stored = Stored(quantize(weight, GlobalScale.from_amax(6.0)))
    low_first, high_first = "27 20 42 64 86 aa cc ee", "72 02 24 46 68 aa cc ee"
    codes = {"torchao": "m._weight_qdata", "compressed-tensors": "m.weight_packed"}
    for name, layout in LAYOUTS.items():
        tensors = layout.export("m", stored)
        row = tensors[codes.get(name, "m.weight")][0].numpy().tobytes().hex(" ")
        assert row == (high_first if name == "comfy" else low_first)
        scales = next(t for t in tensors.values() if t.dtype == torch.float8_e4m3fn)
        assert bytes_of(scales).flatten()[0] == 0x7E
        assert bytes_of(scales).count_nonzero() == 1


@pytest.mark.parametrize(
    ("shape", "linear", "padded"),
    [((208, 80), (208, 5), (256, 8)), ((80, 208), (80, 13), (128, 16))],
)
def test_padding_of_swizzled_scales_is_zero(shape: Shape, linear: Shape, padded: Shape) -> None:
    stored = record(shape)
    for name in ("compressed-tensors", "modelopt"):
        scale = LAYOUTS[name].export("m", stored)["m.weight_scale"]
        assert scale.shape == linear
        assert torch.equal(bytes_of(scale), bytes_of(stored.weight.block_scale))
    comfy = LAYOUTS["comfy"].export("m", stored)["m.weight_scale"]
    torchao = LAYOUTS["torchao"].export("m", stored)["m._weight_scale"]
    assert comfy.shape == padded
    assert torchao.shape == (padded[0] // 4, padded[1] * 4)
    for scale in (comfy, torchao):
        whole = bytes_of(swizzle.unswizzle(scale, *padded))
        inside = whole[: linear[0], : linear[1]]
        assert torch.equal(inside, bytes_of(stored.weight.block_scale))
        assert whole.count_nonzero() == inside.count_nonzero() > 0


def test_comfy_pads_rows_with_zeros_and_remembers_how_many_there_were() -> None:
    comfy = LAYOUTS["comfy"]
    tensors = comfy.export("m", record((72, 32)))
    assert tensors["m.weight"].shape == (80, 16)
    assert not tensors["m.weight"][72:].any()
    marker = json.loads(tensors["m.comfy_quant"].numpy().tobytes())
    assert marker == {"format": "nvfp4"}
    rows = comfy.header_metadata({"m": (72, 32), "even": (80, 32)}, ["norm.weight"], torch.bfloat16)
    assert rows == {"nvfp4.rows": '{"m": 72}'}
    assert comfy.header_metadata({"even": (80, 32)}, [], torch.bfloat16) == {}

    info = SimpleNamespace(shape=(80, 16), file="f")
    ours = SimpleNamespace(tensors={"m.weight": info}, metadata={"f": rows})
    others = SimpleNamespace(tensors={"m.weight": info}, metadata={"f": {}})
    assert comfy.shape("m", ours) == (72, 32)
    assert comfy.shape("m", others) == (80, 32)


def test_torchao_header_describes_every_tensor_under_its_source_name() -> None:
    metadata = LAYOUTS["torchao"].header_metadata(
        {"b": (16, 16), "a": (16, 16)}, ["norm.weight"], torch.float16
    )
    assert json.loads(metadata.pop("tensor_names")) == ["a.weight", "b.weight", "norm.weight"]
    weight = {
        "_type": "NVFP4Tensor",
        "_data": {
            "block_size": 16,
            "orig_dtype": {"_type": "torch.dtype", "_data": "float16"},
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "act_quant_kwargs": None,
        },
        "_tensor_data_names": ["qdata", "scale", "per_tensor_scale"],
    }
    described = {name: json.loads(text) for name, text in metadata.items()}
    plain = {"_type": "Tensor"}
    assert described == {"a.weight": weight, "b.weight": weight, "norm.weight": plain}


def test_torchao_describes_dynamic_activations() -> None:
    """As torchao 0.18 flattens what NVFP4DynamicActivationNVFP4WeightConfig makes."""
    layout = LAYOUTS["torchao"]
    metadata = layout.header_metadata({"m": (16, 16)}, ["n.weight"], torch.bfloat16, True)
    assert json.loads(metadata["m.weight"])["_data"]["act_quant_kwargs"] == {
        "_type": "QuantizeTensorToNVFP4Kwargs",
        "_data": {
            "block_size": 16,
            "is_swizzled_scales": True,
            "use_triton_kernel": False,
            "use_dynamic_per_tensor_scale": True,
        },
    }
    assert layout.dynamic(metadata)
    assert not layout.dynamic(layout.header_metadata({"m": (16, 16)}, [], torch.bfloat16))
    assert not layout.dynamic({"format": "pt"})
    with pytest.raises(CheckpointError, match="is damaged"):
        layout.dynamic({"m.weight": "{"})


def test_headers_of_linear_layouts_say_nothing_more() -> None:
    for name in ("compressed-tensors", "modelopt"):
        assert LAYOUTS[name].header_metadata({"m": (16, 16)}, [], torch.bfloat16) == {}


KEPT = ["model.layers.0.mlp.gate", "lm_head"]
CT_ARGS = '{"num_bits":4,"type":"float","strategy":"tensor_group","group_size":16,"symmetric":true,'
CONFIGS = {
    ("torchao", False): """{"quant_method":"torchao","quant_type":{"default":{
        "_type":"NVFP4WeightOnlyConfig","_version":1,"_data":{"use_dynamic_per_tensor_scale":true}
        }},"modules_to_not_convert":["lm_head","model.layers.0.mlp.gate"],
        "include_input_output_embeddings":false,"untie_embedding_weights":false}""",
    ("torchao", True): """{"quant_method":"torchao","quant_type":{"default":{
        "_type":"NVFP4DynamicActivationNVFP4WeightConfig","_version":1,"_data":{
        "use_dynamic_per_tensor_scale":true,"use_triton_kernel":false}}},
        "modules_to_not_convert":["lm_head","model.layers.0.mlp.gate"],
        "include_input_output_embeddings":false,"untie_embedding_weights":false}""",
    ("comfy", False): "null",
    ("comfy", True): "null",
    ("compressed-tensors", False): f"""{{"quant_method":"compressed-tensors",
        "format":"nvfp4-pack-quantized","quantization_status":"compressed",
        "global_compression_ratio":null,"kv_cache_scheme":null,
        "ignore":["lm_head","model.layers.0.mlp.gate"],"config_groups":{{"group_0":{{
        "targets":["Linear"],"weights":{CT_ARGS}"dynamic":false}},"input_activations":null,
        "output_activations":null,"format":"nvfp4-pack-quantized"}}}}}}""",
    ("compressed-tensors", True): f"""{{"quant_method":"compressed-tensors",
        "format":"nvfp4-pack-quantized","quantization_status":"compressed",
        "global_compression_ratio":null,"kv_cache_scheme":null,
        "ignore":["lm_head","model.layers.0.mlp.gate"],"config_groups":{{"group_0":{{
        "targets":["Linear"],"weights":{CT_ARGS}"dynamic":false}},
        "input_activations":{CT_ARGS}"dynamic":"local","scale_dtype":"torch.float8_e4m3fn"}},
        "output_activations":null,"format":"nvfp4-pack-quantized"}}}}}}""",
    ("modelopt", False): """{"quant_method":"modelopt","quant_algo":"W4A16_NVFP4",
        "ignore":["lm_head","model.layers.0.mlp.gate"],"config_groups":{"group_0":{
        "weights":{"dynamic":false,"num_bits":4,"type":"float","group_size":16},
        "targets":["Linear"]}},"producer":{"name":"modelopt","version":"0.47.0"}}""",
    ("modelopt", True): """{"quant_method":"modelopt","quant_algo":"NVFP4",
        "ignore":["lm_head","model.layers.0.mlp.gate"],"config_groups":{"group_0":{
        "weights":{"dynamic":false,"num_bits":4,"type":"float","group_size":16},
        "targets":["Linear"],
        "input_activations":{"dynamic":false,"num_bits":4,"type":"float","group_size":16}}},
        "producer":{"name":"modelopt","version":"0.47.0"}}""",
}


@pytest.mark.parametrize(("name", "activations"), CONFIGS)
def test_quantization_config(name: str, activations: bool) -> None:
    contents = Contents(["model.layers.0.mlp.up_proj"], KEPT, activations)
    config = LAYOUTS[name].quantization_config(contents)
    assert config == json.loads(CONFIGS[name, activations])
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(("activations", "algorithm"), [(False, "W4A16_NVFP4"), (True, "NVFP4")])
def test_extra_files(activations: bool, algorithm: str) -> None:
    contents = Contents(["m"], KEPT, activations)
    for name in ("torchao", "comfy", "compressed-tensors"):
        assert LAYOUTS[name].extra_files(contents) == {}
    assert LAYOUTS["modelopt"].extra_files(contents) == {
        "hf_quant_config.json": {
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ["lm_head", "model.layers.0.mlp.gate"],
            },
        }
    }


NAMES = {
    "torchao": ("._weight_qdata", "._weight_scale", "._weight_per_tensor_scale"),
    "comfy": (".weight", ".weight_scale", ".weight_scale_2", ".comfy_quant"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_global_scale"),
    "modelopt": (".weight", ".weight_scale", ".weight_scale_2"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_claims_its_own_modules_alone(name: str) -> None:
    names = {"norm.weight", *(f"a.b{suffix}" for suffix in NAMES[name])}
    claimed = {other: layout.modules(names) for other, layout in LAYOUTS.items()}
    assert claimed == {other: ["a.b"] if other == name else [] for other in LAYOUTS}


@pytest.mark.parametrize(
    "names",
    [
        {"a.weight", "a.bias", "norm.weight"},
        {"a.weight_packed", "a.weight_scale"},  # compressed-tensors' MXFP4
        {"a._weight_qdata", "a._weight_scale"},  # torchao's MXFP4 and int4
        {"a.weight", "a.weight_scale", "a.comfy_quant"},  # ComfyUI's FP8
        {"a.weight", "a.weight_scale_inv"},  # FP8 in blocks
        {"a.weight_packed", "b.weight_global_scale"},
    ],
)
def test_other_formats_are_claimed_by_none(names: set[str]) -> None:
    assert not any(layout.modules(names) for layout in LAYOUTS.values())
