"""Checkpoints on disk seen through the layout that their tensor names reveal."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import CheckpointError
from nvfp4cli.formats.nvfp4 import GlobalScale, amax, dequantize, quantize
from nvfp4cli.layouts import LAYOUTS, StoredWeights, open_weights
from nvfp4cli.layouts.record import Layout, Stored

SHAPES = {"model.up_proj": (40, 80), "model.down_proj": (80, 48)}
PLAIN = {"model.norm.weight": torch.arange(1.0, 81.0).bfloat16()}
W4A4 = [layout for layout in LAYOUTS.values() if layout.INPUT_SCALES]


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


def records(activations: bool = False) -> dict[str, Stored]:
    found = {}
    for i, (module, shape) in enumerate(SHAPES.items()):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16()
        scale = GlobalScale.from_amax(3.5 + i) if activations else None
        found[module] = Stored(quantize(weight, GlobalScale.from_amax(amax(weight))), scale)
    return found


def tensors_of(layout: Layout, activations: bool = False) -> dict[str, Tensor]:
    tensors = dict(PLAIN)
    for module, stored in records(activations).items():
        tensors |= layout.export(module, stored)
    return tensors


def saved(folder: Path, tensors: dict[str, Tensor], layout: Layout | None) -> StoredWeights:
    metadata = layout.header_metadata(SHAPES, PLAIN, torch.bfloat16) if layout else {}
    save_file(tensors, folder / "model.safetensors", {"format": "pt", **metadata})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return open_weights(open_checkpoint(folder))


def test_a_written_file_is_seen_under_the_source_names(layout: Layout, tmp_path: Path) -> None:
    weights = saved(tmp_path, tensors_of(layout), layout)
    assert weights.layout is layout
    assert weights.quantized == SHAPES
    assert weights.plain == ("model.norm.weight",)
    assert weights.names == ("model.down_proj.weight", "model.norm.weight", "model.up_proj.weight")
    assert weights.auxiliary == () and not weights.activations
    for module, stored in records().items():
        found = weights.stored(module)
        assert torch.equal(found.weight.packed, stored.weight.packed)
        assert found.weight.global_scale == stored.weight.global_scale
        assert torch.equal(weights.tensor(f"{module}.weight"), dequantize(stored.weight))
    assert torch.equal(weights.tensor("model.norm.weight"), PLAIN["model.norm.weight"])


def test_an_unquantised_checkpoint_has_no_layout(tmp_path: Path) -> None:
    weight = torch.eye(16)
    weights = saved(tmp_path, {"a.weight": weight, "a.k_scale": torch.ones(1)}, None)
    assert weights.layout is None
    assert weights.quantized == {} and weights.auxiliary == () and not weights.activations
    assert weights.names == weights.plain == ("a.k_scale", "a.weight")
    assert torch.equal(weights.tensor("a.weight"), weight)


@pytest.mark.parametrize("layout", W4A4, ids=lambda layout: layout.NAME)
def test_input_and_cache_scales_stand_apart(layout: Layout, tmp_path: Path) -> None:
    caches = {"model.attn.k_scale": torch.ones(1), "model.attn.v_scale": torch.ones(1)}
    weights = saved(tmp_path, tensors_of(layout, activations=True) | caches, layout)
    assert weights.plain == ("model.norm.weight",)
    assert weights.activations
    assert len(weights.auxiliary) == 4 and set(caches) <= set(weights.auxiliary)
    for module, stored in records(activations=True).items():
        assert weights.stored(module, activations=True).input_scale == stored.input_scale


CODES = {"torchao": "._weight_qdata", "compressed-tensors": ".weight_packed"}
SCALES = {"torchao": "._weight_scale"}
GLOBALS = {
    "torchao": "._weight_per_tensor_scale",
    "compressed-tensors": ".weight_global_scale",
    "modelopt": ".weight_scale_2",
    "comfy": ".weight_scale_2",
}
BROKEN = "model.down_proj"


def broken(
    folder: Path, layout: Layout, suffix: str, change: Callable[[Tensor], Tensor | None]
) -> StoredWeights:
    tensors = tensors_of(layout)
    changed = change(tensors.pop(BROKEN + suffix))
    if changed is not None:
        tensors[BROKEN + suffix] = changed
    weights = saved(folder, tensors, layout)
    assert weights.layout is layout
    weights.stored("model.up_proj")  # the other module can be read
    return weights


def test_a_missing_scale_is_named(layout: Layout, tmp_path: Path) -> None:
    suffix = SCALES.get(layout.NAME, ".weight_scale")
    weights = broken(tmp_path, layout, suffix, lambda scale: None)
    with pytest.raises(CheckpointError, match=f"lacks {BROKEN}{suffix}: quantise"):
        weights.stored(BROKEN)


def test_a_missing_input_scale_is_named(tmp_path: Path) -> None:
    weights = saved(tmp_path, tensors_of(LAYOUTS["modelopt"]), None)
    with pytest.raises(CheckpointError, match=rf"lacks {BROKEN}\.input_scale: quantise"):
        weights.stored(BROKEN, activations=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda scale: scale.float(),
        lambda scale: scale.view(torch.uint8),
        lambda scale: scale[:1].contiguous(),
    ],
    ids=["float32", "uint8", "one row"],
)
def test_a_scale_of_another_form_is_refused(
    layout: Layout, tmp_path: Path, change: Callable[[Tensor], Tensor]
) -> None:
    suffix = SCALES.get(layout.NAME, ".weight_scale")
    weights = broken(tmp_path, layout, suffix, change)
    sentence = rf"{BROKEN}{suffix} is \w+ \[\d+, \d+\] where the {layout.NAME} layout stores float8"
    with pytest.raises(CheckpointError, match=sentence):
        weights.stored(BROKEN)


def test_a_transposed_linear_scale_is_refused(tmp_path: Path) -> None:
    for layout in (LAYOUTS["compressed-tensors"], LAYOUTS["modelopt"]):
        weights = broken(tmp_path, layout, ".weight_scale", lambda scale: scale.t().contiguous())
        with pytest.raises(CheckpointError, match=r"\[3, 80\] where .* \[80, 3\]"):
            weights.stored(BROKEN)


def test_codes_of_another_form_are_refused(layout: Layout, tmp_path: Path) -> None:
    suffix = CODES.get(layout.NAME, ".weight")
    signed = broken(tmp_path, layout, suffix, lambda codes: codes.view(torch.int8))
    with pytest.raises(CheckpointError, match=rf"{BROKEN}{suffix} is int8 .* stores uint8"):
        signed.stored(BROKEN)
    stacked = saved(tmp_path, tensors_of(layout) | {BROKEN + suffix: torch.zeros(2, 4, 8)}, layout)
    with pytest.raises(CheckpointError, match=f"{layout.NAME} tensors of {BROKEN} are incomplete"):
        stacked.stored("model.up_proj")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_global_scale_that_is_none_is_refused(
    layout: Layout, tmp_path: Path, value: float
) -> None:
    weights = broken(tmp_path, layout, GLOBALS[layout.NAME], lambda s: torch.full_like(s, value))
    sentence = f"{BROKEN} cannot be read, a global scale is {value} where it must be positive"
    with pytest.raises(CheckpointError, match=sentence):
        weights.stored(BROKEN)


def test_what_engines_accept_is_accepted(tmp_path: Path) -> None:
    """A scalar as [] or [1], swizzled bytes in another's shape, a marker in other words."""
    for name in ("compressed-tensors", "modelopt"):
        weights = broken(
            tmp_path, LAYOUTS[name], GLOBALS[name], lambda s: s.reshape(() if s.dim() else (1,))
        )
        assert weights.stored(BROKEN).weight.global_scale == records()[BROKEN].weight.global_scale
    flat = broken(tmp_path, LAYOUTS["torchao"], "._weight_scale", lambda s: s.view(128, -1))
    expected = records()[BROKEN].weight.block_scale
    assert torch.equal(flat.stored(BROKEN).weight.block_scale.float(), expected.float())
    marker = torch.tensor(list(b'{"format":"nvfp4"}'), dtype=torch.uint8)
    comfy = broken(tmp_path, LAYOUTS["comfy"], ".comfy_quant", lambda _: marker)
    assert torch.equal(comfy.stored(BROKEN).weight.packed, records()[BROKEN].weight.packed)


def test_zero_blocks_of_other_makers_are_read(tmp_path: Path) -> None:
    """Where the codes are 0 the scale says nothing: 0.125 and 1.0 are in use."""
    layout = LAYOUTS["modelopt"]
    stored = quantize(torch.zeros(16, 16), GlobalScale.from_amax(6.0))
    for value in (0.0, 0.125, 1.0):
        tensors = layout.export("m", Stored(stored))
        tensors["m.weight_scale"] = torch.full((16, 1), value).to(torch.float8_e4m3fn)
        weights = saved(tmp_path, tensors, None)
        assert not weights.tensor("m.weight").any()
