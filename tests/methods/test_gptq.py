"""GPTQ against the textbook's update with explicit inverses, and by what it does to outputs."""

import pytest
import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import Quantized
from nvfp4cli.methods import gptq, scales

ROWS, COLUMNS = 24, 96


def inputs(tokens: int = 400, seed: int = 0) -> Tensor:
    """Inputs whose columns go together and differ in size, fp64 [T, K]."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=generator, dtype=torch.float64)
    mixing += 4 * torch.eye(COLUMNS)
    x = torch.randn(tokens, COLUMNS, generator=generator, dtype=torch.float64) @ mixing
    return x * torch.rand(COLUMNS, generator=generator, dtype=torch.float64).add(0.1)


def weight(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def textbook(w: Tensor, hessian: Tensor, searched: Quantized) -> Tensor:
    """Optimal brain quantisation in a fixed order: fp64 dequantised [N, K].

    After each column the inverse of the Hessian of the columns that remain is computed anew.
    """
    w, k = w.double().clone(), w.shape[1]
    h = hessian + gptq.DAMPING * hessian.diagonal().mean() * torch.eye(k)
    order = hessian.diagonal().float().argsort(descending=True, stable=True).tolist()
    multiplier = searched.global_scale.multiplier
    stored = e4m3.decode(searched.block_scale)
    reciprocal = nvfp4.block_reciprocal(stored, multiplier)
    result = torch.empty_like(w)
    for n, j in enumerate(order):
        inverse = torch.linalg.inv(h[order[n:]][:, order[n:]])
        codes = e2m1.encode(w[:, j].float() * reciprocal[:, j // 16])
        result[:, j] = e2m1.decode(codes).double() * (stored[:, j // 16] * multiplier)
        error = (w[:, j] - result[:, j]) / inverse[0, 0]
        w[:, order[n:]] -= error[:, None] * inverse[0][None]
    return result


def output_error(q: Quantized, w: Tensor, x: Tensor) -> float:
    return (x @ (nvfp4.dequantize(q).double() - w).T).square().sum().item()


@pytest.mark.parametrize("method", scales.METHODS)
def test_equal_to_the_textbook(method, monkeypatch):
    monkeypatch.setattr(gptq, "_COLUMNS", 40)  # the last of three blocks is short
    w, x = weight(), inputs()
    hessian = x.T @ x
    scale = scales.global_scale(nvfp4.amax(w), method)
    q = gptq.quantize(w, hessian, scale, method)
    importance = scales.importance_of(hessian, method) / hessian.diagonal().float().mean()
    searched = scales.quantize(w, scale, method, importance)
    assert torch.equal(q.block_scale.view(torch.uint8), searched.block_scale.view(torch.uint8))
    expected, found = textbook(w, hessian, searched), nvfp4.dequantize(q).double()
    # A value at a midpoint may go the other way in fp32, and what follows in its row with it.
    same = torch.isclose(found, expected, rtol=1e-6, atol=0).all(dim=1)
    assert same.double().mean() > 0.9


def test_outputs_change_less_than_by_rounding_to_nearest():
    w, (x, held_out) = weight(), inputs(4000).split([3500, 500])
    found = {}
    for method in ("rtn", "mse"):
        scale = scales.global_scale(nvfp4.amax(w), method)
        found[method] = output_error(scales.quantize(w, scale, method), w, held_out)
        compensated = gptq.quantize(w, x.T @ x, scale, method)
        found[f"gptq {method}"] = output_error(compensated, w, held_out)
    assert found["gptq rtn"] < 0.75 * found["rtn"]
    assert found["gptq mse"] < found["gptq rtn"]


def test_without_correlations_it_rounds_to_nearest():
    w = weight()
    scale = scales.global_scale(nvfp4.amax(w), "rtn")
    q = gptq.quantize(w, torch.eye(COLUMNS), scale, "rtn")
    nearest = nvfp4.quantize(w, scale)
    assert torch.equal(q.packed, nearest.packed)


def test_columns_that_no_input_reaches():
    w, x = weight(), inputs()
    x[:, [3, 50]] = 0
    scale = scales.global_scale(nvfp4.amax(w), "rtn")
    q = gptq.quantize(w, x.T @ x, scale, "rtn")
    nearest = e2m1.unpack(nvfp4.quantize(w, scale).packed)
    assert torch.equal(e2m1.unpack(q.packed)[:, [3, 50]], nearest[:, [3, 50]])
    nothing = gptq.quantize(w, torch.zeros(COLUMNS, COLUMNS), scale, "rtn")
    assert torch.equal(nothing.packed, nvfp4.quantize(w, scale).packed)


def test_few_tokens_and_nearly_dependent_columns():
    """The Hessian of 10 tokens has rank 10, and fp32 alone may fail at it."""
    w, x = weight(), inputs(10)
    x[:, 1] = x[:, 0] * (1 + 1e-9)
    scale = scales.global_scale(nvfp4.amax(w), "mse")
    q = gptq.quantize(w, x.T @ x * 1e6, scale, "mse")
    assert torch.isfinite(nvfp4.dequantize(q)).all()
    assert output_error(q, w, x) < output_error(scales.quantize(w, scale, "mse"), w, x)


def test_the_unit_of_the_hessian_does_not_matter():
    w, x = weight(), inputs()
    scale = scales.global_scale(nvfp4.amax(w), "mse")
    found = [gptq.quantize(w, x.T @ x * unit, scale, "mse") for unit in (1.0, 2.0**-20)]
    assert torch.equal(found[0].packed, found[1].packed)
