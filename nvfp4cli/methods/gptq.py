"""GPTQ: columns are rounded one after the other, each error made good by those that follow.

Frantar et al., "GPTQ" (arXiv:2210.17323), with the block scales fixed before the first column is
rounded and the columns taken in the order of what they count ("static activation order"): scales
belong to blocks of neighbouring columns, whatever the order in which these are rounded.
"""

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized
from nvfp4cli.methods import scales

_COLUMNS = 128  # rounded before what follows them is corrected by one product
DAMPING = 0.05  # of the mean of the Hessian's diagonal


def quantize(
    weight: Tensor, hessian: Tensor, scale: GlobalScale, method: str, damping: float = DAMPING
) -> Quantized:
    """Round a matrix to NVFP4 so that its outputs change least.

    weight: [N, K], any float dtype, finite, K a multiple of 16. hessian: [K, K] fp32 or fp64, the
    sum of x x^T over inputs x [K] that the layer sees, in any unit. scale: of
    `scales.global_scale`. method: how block scales are chosen, by errors that count as
    `scales.importance_of` the Hessian says. A column that no input reaches changes nothing, and
    rounds to nearest; so do all without any input.

    Computed in fp32; the inverse in fp64 where fp32 finds the Hessian not positive definite.
    """
    nvfp4.check_blocks(weight.shape)
    diagonal = hessian.diagonal().to(torch.float32)
    if not bool(diagonal.any()):
        return scales.quantize(weight, scale, method)
    importance = scales.importance_of(hessian, method)
    searched = scales.quantize(weight, scale, method, importance / diagonal.mean())
    stored = e4m3.decode(searched.block_scale)  # [N, K/16]
    reciprocal = nvfp4.block_reciprocal(stored, scale.multiplier)
    order = diagonal.argsort(descending=True, stable=True)
    upper = _inverse_factor(hessian, order, damping)
    codes = _compensated(weight, order, reciprocal, stored * scale.multiplier, upper)
    return Quantized(e2m1.pack(codes), searched.block_scale, scale)


def enough(tokens: int, width: int) -> bool:
    """Whether a Hessian of inputs of `width` channels says enough to compensate errors by.

    With fewer tokens than a quarter of the channels, as rare experts have, most directions are
    unseen: then only the block scales are chosen by what was seen.
    """
    return tokens >= width // 4


def damped(hessian: Tensor, damping: float) -> Tensor:
    """The Hessian with a share of its mean diagonal on the diagonal; dead columns stand alone."""
    diagonal = hessian.diagonal()
    ridge = damping * diagonal.mean() + torch.where(diagonal == 0, diagonal.mean(), 0)
    return hessian + torch.diag(ridge)


def _inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """fp32 [K, K], upper triangular U with H^-1 = U^T U, of the damped Hessian in `order`.

    Row i of U, divided by its diagonal, is what the error of column i asks of those behind it.
    """
    ordered = damped(hessian, damping)[order][:, order]
    for dtype in (torch.float32, torch.float64):
        lower, fault = torch.linalg.cholesky_ex(ordered.to(dtype))
        if not bool(fault):
            inverse = torch.cholesky_inverse(lower)
            upper, fault = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(fault):
                return upper.to(torch.float32)
    raise ArithmeticError("a Hessian that is damped is not positive definite")


def _compensated(
    weight: Tensor, order: Tensor, reciprocal: Tensor, step: Tensor, upper: Tensor
) -> Tensor:
    """Codes uint8 [N, K]; reciprocal, step: of the blocks, from and to weights, fp32 [N, K/16].

    Everything is transposed, so that a column is contiguous.
    """
    left = weight.T[order].to(torch.float32)  # [K, N]: what remains to be rounded
    block = order // BLOCK
    reciprocal, step = reciprocal.T, step.T
    factors = upper / upper.diagonal()[:, None]
    values = torch.empty_like(left)
    for start in range(0, len(left), _COLUMNS):
        own = slice(start, start + _COLUMNS)
        values[own], errors = kernels.compensate(
            left[own], factors[own, own], reciprocal[block[own]], step[block[own]]
        )
        left[own.stop :].addmm_(factors[own, own.stop :].T, errors, alpha=-1)
    codes = torch.empty_like(values, dtype=torch.uint8)
    # The sign of a zero too, which encoding to nearest keeps.
    codes[order] = e2m1.encode(values.abs()) | (torch.signbit(values).to(torch.uint8) << 3)
    return codes.T
