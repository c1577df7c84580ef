"""Weights for inputs that earlier rounding has changed.

The quantised model gives a layer inputs xq where the unquantised one gives it x. What comes nearest
to W x is W C H^-1 applied to xq, with H the sum of xq xq^T and C that of x xq^T: a regression,
damped towards W by a ridge. A calibration text of a few ten thousand tokens overfits it, so the
weight goes only a part of the way.
"""

import torch
from torch import Tensor

from nvfp4cli.methods import gptq

_RIDGES = (0.03, 0.1, 0.3)  # of the mean of the Hessian's diagonal
# Where activations are quantised: the ridge, the step for as many tokens, and the most that a row
# is scaled by.
_RIDGE = 0.1
_STEP, _TOKENS = 0.25, 32768
_SCALES = (0.8, 1.5)


def by_held_out(
    weight: Tensor, fit: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]
) -> Tensor:
    """The weight, moved towards the regression as far as text that is held out approves.

    weight: fp32 [N, K]. fit, held_out: H and C, fp32 [K, K], of two parts of the text. Of several
    ridges the best is taken; the step has a closed form. What has been chosen is done with both.
    Returns fp32 [N, K].
    """
    hessian, cross = fit
    if not bool(hessian.any()) or not bool(held_out[0].any()):
        return weight
    best, gain = (0.0, 0.0), 0.0
    asked = weight @ (held_out[1] - held_out[0])
    for ridge in _RIDGES:
        move = _move(weight, hessian, cross, ridge)
        # ||W x - (W + s M) xq||^2 falls by 2 s <asked, M> - s^2 tr(M H M^T).
        slope = (asked * move).sum(dtype=torch.float64).item()
        curvature = ((move @ held_out[0]) * move).sum(dtype=torch.float64).item()
        step = min(1.0, max(0.0, slope / curvature)) if curvature > 0 else 0.0
        if (fall := step * (2 * slope - step * curvature)) > gain:
            best, gain = (ridge, step), fall
    ridge, step = best
    if step == 0:
        return weight
    whole, both = hessian + held_out[0], cross + held_out[1]
    return weight + step * _move(weight, whole, both, ridge)


def keeping_power(
    weight: Tensor, hessian: Tensor, cross: Tensor, square: Tensor, tokens: int
) -> Tensor:
    """The weight, moved a small part of the way towards the regression, its outputs as large.

    For inputs whose own rounding adds noise. A regression on noisy inputs shrinks the weight, which
    held-out text approves in every layer and the model does not bear in all of them. So the step is
    short, longer for more tokens, and every row is scaled to give outputs of the mean square that
    the unquantised model's have.

    weight: fp32 [N, K]. hessian, cross: as above; square: the sum of x x^T; fp32 [K, K]. tokens:
    how many were summed. Returns fp32 [N, K].
    """
    if not bool(hessian.any()):
        return weight
    step = min(1.0, _STEP * (tokens / _TOKENS) ** (1 / 3))
    moved = weight + step * _move(weight, hessian, cross, _RIDGE)
    wanted = ((weight @ square) * weight).sum(dim=1)
    found = ((moved @ hessian) * moved).sum(dim=1)
    scale = torch.where((wanted > 0) & (found > 0), wanted / found, 1).sqrt()
    return moved * scale.clamp(*_SCALES)[:, None]


def _move(weight: Tensor, hessian: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """From the weight to the regression: W (C - H) (H + ridge)^-1, fp32 [N, K]."""
    damped = gptq.damped(hessian, ridge)
    lower, fault = torch.linalg.cholesky_ex(damped)
    if bool(fault):  # fp32 has lost its smallest directions
        lower = torch.linalg.cholesky(damped.to(torch.float64))
    residual = (weight @ (cross - hessian)).to(lower.dtype)
    return torch.cholesky_solve(residual.T, lower).T.to(torch.float32)
