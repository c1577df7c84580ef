"""Scales chosen by e^T H e of each block, against the definition in double precision."""

import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import Quantized
from nvfp4cli.methods import gptq, scales

ROWS, COLUMNS = 40, 96
BLOCKS = COLUMNS // 16
GRID = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64)
CODES = e4m3.decode(torch.arange(127, dtype=torch.uint8)).double()


def weight() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def hessian(tokens: int = 1000) -> Tensor:
    """Of inputs with a mean, whose neighbouring channels go together: fp64 [K, K]."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, COLUMNS, generator=generator, dtype=torch.float64)
    mixing = 0.8 ** (torch.arange(COLUMNS)[:, None] - torch.arange(COLUMNS)).abs().double()
    x = x @ mixing + torch.randn(COLUMNS, generator=generator, dtype=torch.float64)
    return x.T @ x


def parts(h: Tensor) -> Tensor:
    """The blocks of a Hessian along its diagonal, [K/16, 16, 16]."""
    return torch.stack([h[k : k + 16, k : k + 16] for k in range(0, len(h), 16)])


def quantized(w: Tensor, h: Tensor, method: str) -> Quantized:
    scale = scales.global_scale(nvfp4.amax(w), method)
    return scales.quantize(w, scale, method, scales.importance_of(h, method))


def errors_of(q: Quantized, w: Tensor) -> Tensor:
    """Of the values of each block: fp64 [N, K/16, 16]."""
    return (nvfp4.dequantize(q).double() - w.double()).view(len(w), -1, 16)


def weighed(e: Tensor, h: Tensor) -> Tensor:
    """e^T H e of each block: fp64 [N, K/16]."""
    return torch.einsum("nbi,bij,nbj->nb", e, parts(h), e)


def rounding(e: Tensor, h: Tensor) -> Tensor:
    """What fp32 may take e^T H e by: [N, K/16].

    A sum of 136 terms one after the other, each of four rounded factors and products: 140 times
    half a unit of what the terms are without their signs.
    """
    return 70 * torch.finfo(torch.float32).eps * weighed(e.abs(), h.abs())


def test_the_blocks_are_those_along_the_diagonal():
    h = hessian()
    assert torch.equal(scales.importance_of(h, "mse-block"), parts(h).float())
    assert torch.equal(scales.importance_of(h, "mse"), h.diagonal().float())


def test_no_other_scale_of_the_search_is_better():
    w, h = weight(), hessian()
    q = quantized(w, h, "mse-block")
    blocks = w.view(ROWS, BLOCKS, 16)
    ratio = blocks.double().abs().amax(dim=2) / 6 / q.global_scale.multiplier
    base = (ratio[..., None] - CODES).abs().argmin(dim=-1)  # [N, K/16]
    taken = errors_of(q, w)
    for offset in range(-3, 8):
        stored = CODES[(base + offset).clamp(1, 126)].float()
        step = (stored * q.global_scale.multiplier)[..., None]
        nearest = GRID[((blocks.double().abs() / step)[..., None] - GRID).abs().argmin(dim=-1)]
        tried = (nearest.float() * step * blocks.sign()).double() - blocks.double()
        margin = rounding(taken, h) + rounding(tried, h)
        assert (weighed(taken, h) <= weighed(tried, h) + margin).all()
        assert (margin < 1e-2 * weighed(tried, h)).all()


def test_no_block_is_worse_than_by_the_diagonal():
    w, h = weight(), hessian()
    block, diagonal = (errors_of(quantized(w, h, rule), w) for rule in ("mse-block", "mse"))
    margin = rounding(block, h) + rounding(diagonal, h)
    assert (weighed(block, h) <= weighed(diagonal, h) + margin).all()
    assert weighed(block, h).sum() < 0.5 * weighed(diagonal, h).sum()


def test_a_diagonal_hessian_gives_what_mse_gives():
    w, h = weight(), hessian().diagonal().diag()
    block, diagonal = (quantized(w, h, rule) for rule in ("mse-block", "mse"))
    assert torch.equal(block.packed, diagonal.packed)
    assert torch.equal(block.block_scale.view(torch.uint8), diagonal.block_scale.view(torch.uint8))


def test_signs_of_weights_matter():
    """Flipping a channel's sign, of the weight and of the input, changes nothing."""
    w, h = weight(), hessian()
    signs = torch.ones(COLUMNS).scatter(0, torch.arange(0, COLUMNS, 3), -1.0)
    q = quantized(w, h, "mse-block")
    flipped = quantized(w * signs, h * signs[:, None] * signs, "mse-block")
    scale = q.block_scale.view(torch.uint8)
    assert torch.equal(flipped.block_scale.view(torch.uint8), scale)
    alone = quantized(w * signs, h, "mse-block")
    assert not torch.equal(alone.block_scale.view(torch.uint8), scale)


def test_without_inputs_every_column_counts_the_same():
    w = weight()
    scale = scales.global_scale(nvfp4.amax(w), "mse")
    found = (
        scales.quantize(w, scale, "mse-block"),
        gptq.quantize(w, torch.zeros(COLUMNS, COLUMNS), scale, "mse-block"),
    )
    expected = scales.quantize(w, scale, "mse")
    for q in found:
        assert torch.equal(q.packed, expected.packed)
