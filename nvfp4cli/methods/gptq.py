"""GPTQ: columns are rounded one after the other, each error made good by those that follow.

Frantar et al., "GPTQ" (arXiv:2210.17323), with the block scales fixed before the first column is
rounded and the columns taken in the order of what they count ("static activation order"): scales
belong to blocks of neighbouring columns, whatever the order in which these are rounded.
"""

import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, e4m3, nvfp4
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized
from nvfp4cli.methods import scales

_COLUMNS = 128  # rounded before what follows them is corrected by one product
DAMPING = 0.01  # of the mean of the Hessian's diagonal


def quantize(
    weight: Tensor, hessian: Tensor, scale: GlobalScale, method: str, damping: float = DAMPING
) -> Quantized:
    """Round a matrix to NVFP4 so that its outputs change least.

    weight: [N, K], any float dtype, finite, K a multiple of 16. hessian: [K, K] fp32 or fp64, the
    sum of x x^T over inputs x [K] that the layer sees, in any unit. scale: of
    `scales.global_scale`. method: how block scales are chosen, by errors that count as their
    columns do. A column that no input reaches changes nothing, and rounds to nearest.

    Computed in fp32; the inverse in fp64 where fp32 finds the Hessian not positive definite.
    """
    nvfp4.check_blocks(weight.shape)
    diagonal = hessian.diagonal().to(torch.float32)
    importance = diagonal / diagonal.mean() if bool(diagonal.any()) else None
    searched = scales.quantize(weight, scale, method, importance)
    stored = e4m3.decode(searched.block_scale)  # [N, K/16]
    reciprocal = nvfp4.block_reciprocal(stored, scale.multiplier)
    order = diagonal.argsort(descending=True, stable=True)
    upper = _inverse_factor(hessian, order, damping)
    codes = _compensated(weight, order, reciprocal, stored * scale.multiplier, upper)
    return Quantized(e2m1.pack(codes), searched.block_scale, scale)


def _inverse_factor(hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """fp32 [K, K], upper triangular U with H^-1 = U^T U, of the damped Hessian in `order`.

    Row i of U, divided by its diagonal, is what the error of column i asks of those behind it.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    ridge = damping * diagonal.mean() + dead.to(hessian.dtype)  # a dead column is left alone
    damped = hessian[order][:, order] + torch.diag(ridge[order] if ridge.ndim else ridge)
    for dtype in (torch.float32, torch.float64):
        lower, fault = torch.linalg.cholesky_ex(damped.to(dtype))
        if not bool(fault):
            inverse = torch.cholesky_inverse(lower)
            upper, fault = torch.linalg.cholesky_ex(inverse, upper=True)
            if not bool(fault):
                return upper.to(torch.float32)
    raise ArithmeticError("a Hessian that is damped is not positive definite")


def _compensated(
    weight: Tensor, order: Tensor, reciprocal: Tensor, step: Tensor, upper: Tensor
) -> Tensor:
    """Codes uint8 [N, K]; reciprocal, step: of the blocks, from and to weights, fp32 [N, K/16]."""
    left = weight[:, order].to(torch.float32)  # what remains to be rounded
    block = order // BLOCK
    codes = torch.empty_like(left, dtype=torch.uint8)
    for start in range(0, left.shape[1], _COLUMNS):
        stop = min(start + _COLUMNS, left.shape[1])
        errors = torch.empty_like(left[:, start:stop])
        for i in range(start, stop):
            column = left[:, i]
            codes[:, i] = e2m1.encode(column * reciprocal[:, block[i]])
            rounded = e2m1.decode(codes[:, i]) * step[:, block[i]]
            error = (column - rounded) / upper[i, i]
            left[:, i + 1 : stop].addr_(error, upper[i, i + 1 : stop], alpha=-1)
            errors[:, i - start] = error
        left[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    natural = torch.empty_like(codes)
    natural[:, order] = codes
    return natural
