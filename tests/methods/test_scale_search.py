"""The search over block scales against trying every one of them in double precision."""

import pytest
import torch
from command import quantize
from torch import Tensor

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.layouts import open_weights
from nvfp4cli.methods import scales
from nvfp4cli.pipeline import importance

GRID = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64)
CODES = e4m3.decode(torch.arange(1, 127, dtype=torch.uint8)).double()


def draw(kind: str, rows: int = 24, columns: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    x = torch.randn(rows, columns, generator=generator)
    if kind == "heavy":
        x /= torch.rand(rows, columns, generator=generator).clamp(min=0.02)
    return x * (torch.arange(columns) % 7 + 1) if kind == "columns" else x


def errors(weight: Tensor, multiplier: float, importance: Tensor) -> Tensor:
    """Of each block under each of the 126 scales: fp64 [blocks, 126]."""
    blocks = weight.double().abs().view(-1, 16)
    counts = importance.double().expand_as(weight).reshape(-1, 16)
    found = []
    for code in CODES:
        scale = code * multiplier
        nearest = ((blocks / scale)[..., None] - GRID).abs().argmin(dim=-1)
        found.append((counts * (GRID[nearest] * scale - blocks).square()).sum(dim=1))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "columns"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_other_scale_has_a_smaller_error(kind, dtype):
    weight = draw(kind).to(dtype)
    scale = scales.global_scale(nvfp4.amax(weight), "mse")
    q = scales.quantize(weight, scale, "mse")
    tried = errors(weight, scale.multiplier, torch.ones(weight.shape[1]))
    taken = (q.block_scale.view(torch.uint8).flatten().long() - 1)[:, None]
    # fp32 differences of values that lie within a few units of each other.
    assert torch.allclose(tried.gather(1, taken)[:, 0], tried.amin(dim=1), rtol=1e-5, atol=0)
    found = (nvfp4.dequantize(q).double() - weight.double()).view(-1, 16).square().sum(dim=1)
    assert torch.allclose(found, tried.amin(dim=1), rtol=1e-5, atol=0)


def test_important_columns_decide():
    weight = draw("gaussian")
    importance = torch.full((128,), 1e-3)
    importance[::16] = 1.0
    scale = scales.global_scale(nvfp4.amax(weight), "mse")
    q = scales.quantize(weight, scale, "mse", importance)
    plain = scales.quantize(weight, scale, "mse")
    tried = errors(weight, scale.multiplier, importance)
    taken, even = (
        tried.gather(1, (r.block_scale.view(torch.uint8).flatten().long() - 1)[:, None])[:, 0]
        for r in (q, plain)
    )
    assert (taken <= even * (1 + 1e-5)).all()
    assert taken.sum() < 0.5 * even.sum()


def test_the_tiling_changes_nothing(monkeypatch):
    weight = draw("heavy", rows=50)
    scale = scales.global_scale(nvfp4.amax(weight), "mse")
    whole = scales.quantize(weight, scale, "mse")
    monkeypatch.setattr(scales, "_TILE", 1000)
    parts = scales.quantize(weight, scale, "mse")
    assert torch.equal(whole.packed, parts.packed)
    assert torch.equal(whole.block_scale.view(torch.uint8), parts.block_scale.view(torch.uint8))


def test_zeros_and_small_blocks():
    weight = torch.zeros(2, 32)
    weight[1, 0], weight[1, 16] = 1.0, 1e-7
    q = scales.quantize(weight, scales.global_scale(1.0, "mse"), "mse")
    byte = q.block_scale.view(torch.uint8)
    assert byte[0].tolist() == [0, 0]
    assert byte[1, 1] == 1
    assert not nvfp4.dequantize(q)[0].any()


def test_gaussian_error():
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(2))
    scale = scales.global_scale(nvfp4.amax(weight), "mse")
    error = (
        (nvfp4.dequantize(scales.quantize(weight, scale, "mse")) - weight).double().square().mean()
    )
    # The figure is of 2 million samples; 16384 blocks scatter by 1.6 % at four sigma.
    assert error / weight.double().square().mean() == pytest.approx(6.602e-3, rel=0.016)


@pytest.mark.parametrize("method", ["four-over-six", "mse"])
def test_a_run_writes_what_the_method_gives(method, tiny_model, tmp_path):
    model = tiny_model("llama", vocab=264)
    assert quantize(model, tmp_path / "out", "--layout", "modelopt", "--method", method) == 0
    source, stored = open_checkpoint(model), open_weights(open_checkpoint(tmp_path / "out"))
    names = [f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up")]
    weights = [source.read(f"{name}.weight") for name in names]
    scale = scales.global_scale(max(map(nvfp4.amax, weights)), method)
    gain = source.read("model.layers.0.post_attention_layernorm.weight").float()
    counts = importance.counted(gain.square()) if method == "mse" else None
    for name, weight in zip(names, weights, strict=True):
        found, expected = stored.stored(name).weight, scales.quantize(weight, scale, method, counts)
        assert torch.equal(found.packed, expected.packed)
        assert torch.equal(
            found.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8)
        )
        assert found.global_scale.multiplier == scale.multiplier
