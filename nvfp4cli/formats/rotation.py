"""What a fused kernel does to its input before the first block is encoded. The reference.

Every function fixes its order of operations, since fp32 sums and products depend on it: what stands
here, done with IEEE additions and products that are not fused, is what each kernel must give bit
for bit.
"""

import math

import torch
from torch import Tensor

BLOCKS = (16, 32, 64, 128)

_MAGIC = 1.5 * 2**23  # v + _MAGIC is rounded to an integer, ties to even
# For SiLU: t = -gate log2(e) in octaves, counted along share = SHARE - gate / 128, which
# has 128 log2(e) of them; OCTAVES, which only chooses one, has twelve bits of that. In octave n
# 2^t = 2^(n + LOWEST) (y^3 + LINEAR y + CONSTANT), as every cubic can be written, where
# y = SLOPE share - STEP n + CENTER. All were fitted together for the smallest relative error, 9e-5;
# STEP and CENTER are short, so that the terms with n are exact. One power more, 3.5e-6, would make
# the fused kernel 5 % slower.
# A product and its addition round once, as a fused operation does: float64 holds both exactly.
# share is a multiple of 2^-25 up to 1, since SHARE is one and so is gate / 128 where the difference
# is below 1/4; the multiples of OCTAVES and of SLOPE are ones of 2^-29 below 2^8 and of 2^-43 below
# 2^6; y is a multiple of 2^-25 between 1/4 and 1, and y^2 + LINEAR one of 2^-24 below 2.
SHARE = 0.501629114151001
OCTAVES = 184.6875
STEP = 21 / 64
CENTER = 31 / 64
SLOPE = 60.59319305419922  # 128 log2(e) STEP
LINEAR = 0.6583487391471863
CONSTANT = 0.2121094912290573
LOWEST = -92
SMALLEST_GATED = 2.0**-100  # smaller products are zeros, so that a rotation meets no subnormals
_SMALLEST_FACTOR = 2.0**-126


def butterflies(x: Tensor) -> Tensor:
    """Sylvester's Hadamard transform along the last axis, not normalised.

    x: fp32 [..., 2^k]. The widest butterfly first: a, b become a + b, a - b at the distance
    2^(k-1), then 2^(k-2), down to neighbours. H is symmetric, so this is x H as well as H x.
    """
    size = x.shape[-1]
    distance = size // 2
    while distance:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        distance //= 2
    return x


def block_hadamard(x: Tensor, size: int, signs: Tensor | None = None) -> Tensor:
    """Rotate each run of `size` values of a row by H / sqrt(size).

    x: [..., K], any float dtype, K a multiple of `size`, a power of two. signs: +-1, any dtype
    [size], multiplied in first: the same for every block. Returns fp32, orthonormal up to rounding;
    the factor 1 / sqrt(size) is rounded to fp32 (exact for 16 and 64) and applied last.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, size))
    if signs is not None:
        blocks = blocks * signs.to(torch.float32)
    return (butterflies(blocks) * normalizer(size)).flatten(-2)


def hadamard_rows(x: Tensor, dense: Tensor | None = None) -> Tensor:
    """Rotate whole rows by (D kron H) / sqrt(K), with D a dense Hadamard factor.

    x: [..., K], any float dtype, K = m 2^k. dense: int8 [m, m], entries +-1, left out for m = 1.
    Returns fp32 x (D kron H) / sqrt(K): first D, y_j = sum over i of x_i D[i, j] added in the
    order of i, then the butterflies, then the factor, rounded to fp32.
    """
    k = x.shape[-1]
    y = x.to(torch.float32)
    if dense is not None:
        m = len(dense)
        parts = y.unflatten(-1, (m, -1)).unsqueeze(-2)  # [..., m, 1, 2^k]
        columns = dense.to(torch.float32)[..., None]  # [m, m, 1]
        y = parts[..., 0, :, :] * columns[0]
        for i in range(1, m):
            y = y + parts[..., i, :, :] * columns[i]
        return (butterflies(y) * normalizer(k)).flatten(-2)
    return butterflies(y) * normalizer(k)


def normalizer(size: int) -> float:
    """1 / sqrt(size), rounded to fp32."""
    return torch.tensor(1 / math.sqrt(size), dtype=torch.float32).item()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up in fp32: (gate / (1 + 2^t)) * up with t = -gate log2(e), held in [-92, 92].

    gate, up: the same shape, any float dtype. The power is this function's own, so that it has the
    same bits everywhere; SiLU's relative error is below 1e-4 where gate is above -63, a twentieth
    of what rounding gate to bf16 does, and below that SiLU's size at most 2^-90 of gate's. Nothing
    is rounded to bf16 in between. Subnormal factors and products below 2^-100 count as zeros.
    """
    g = _flush(gate.to(torch.float32), _SMALLEST_FACTOR)
    share = (SHARE - g / 128).clamp(0, 1)
    octave = _fma(share, OCTAVES, _MAGIC) - _MAGIC
    y = _fma(share, SLOPE, CENTER - STEP * octave)
    power = _fma(_fma(y, y, LINEAR), y, CONSTANT)
    exponent = octave.to(torch.int32) + LOWEST
    power = (power.view(torch.int32) + (exponent << 23)).view(torch.float32)
    silu = _flush(g * (1.0 / (power + 1.0)), SMALLEST_GATED)
    return _flush(silu * _flush(up.to(torch.float32), _SMALLEST_FACTOR), SMALLEST_GATED)


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a b + c of fp32 values, rounded once: for sums that float64 holds exactly."""
    return (a.double() * b + c).float()


def _flush(x: Tensor, smallest: float) -> Tensor:
    return torch.where(x.abs() < smallest, 0.0, x)
