"""Front door: the fastest encoder for where a tensor lies, always with the reference's bits.

Triton is imported inside the functions: it has no wheels outside Linux, and takes half a second.
"""

import torch
from torch import Tensor

from nvfp4cli.formats import mxfp4, nvfp4, rotation, swizzle
from nvfp4cli.formats.nvfp4 import GlobalScale, Quantized

__all__ = [
    "amax",
    "compensate",
    "dequantize",
    "dequantize_mxfp4",
    "fused_amax",
    "fused_quantize",
    "hadamard",
    "hadamard_amax",
    "hadamard_quantize",
    "quantize",
    "quantize_dequantize",
    "quantize_dequantize_mxfp4",
    "quantize_mxfp4",
]


def amax(weight: Tensor) -> float:
    """Largest magnitude of a matrix [N, K], where it lies; the value of `formats.nvfp4.amax`."""
    if weight.is_cuda:
        return nvfp4.amax(weight)
    from nvfp4cli.kernels.quantize_cpu import amax_cpu

    return amax_cpu(weight)


def quantize(weight: Tensor, scale: GlobalScale) -> Quantized:
    """Round a matrix to NVFP4 where it lies; the same bits as `formats.nvfp4.quantize`.

    weight: [N, K] bf16, fp16 or fp32, any strides, finite, K a multiple of 16.
    """
    if weight.is_cuda:
        from nvfp4cli.kernels.quantize_triton import quantize_triton

        return quantize_triton(weight, scale)
    from nvfp4cli.kernels.quantize_cpu import quantize_cpu

    return quantize_cpu(weight, scale)


def compensate(
    left: Tensor, factors: Tensor, reciprocal: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Round columns to E2M1 one after the other, each error made good by those that follow.

    left: fp32 [C, N], C columns of a matrix with N rows. factors: fp32 [C, C], what the error of
    column i, in units of it, takes from column j > i. reciprocal, step: fp32 [C, N], from a weight
    to E2M1's scale and back. Returns E2M1 values and errors, fp32 [C, N].
    """
    if left.is_cuda:
        from nvfp4cli.kernels.compensate_triton import compensate_triton

        return compensate_triton(left, factors, reciprocal, step)
    from nvfp4cli.kernels.compensate_torch import compensate_torch

    return compensate_torch(left, factors, reciprocal, step)


def fused_quantize(
    x: Tensor,
    multiplier: Tensor,
    *,
    up: Tensor | None = None,
    hadamard: int = 1,
    signs: Tensor | None = None,
    swizzled_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Activations to NVFP4 in one pass: `rotation.silu_mul`, `rotation.block_hadamard`, encoding.

    x: [N, K] bf16, fp16 or fp32, any strides, finite, K a multiple of 16 and of `hadamard`.
    multiplier: fp32 [1] on x's device, the global scale of what is encoded (`fused_amax` / 2688);
    it is not waited for. up: like x; then x is the gate and SiLU(x) * up is encoded. hadamard: 1
    (no rotation), 16, 32, 64 or 128. signs: +-1 [hadamard], applied before the rotation.

    Returns the codes, uint8 [N, K/2], low nibble first, and the block scales, float8_e4m3fn [N,
    K/16] or, where `swizzled_scales`, of `swizzle.padded_shape` with zeros in the padding.
    Raises ValueError for a shape or a size that does not fit.
    """
    _check_fused(x, up, hadamard, signs)
    if x.is_cuda:
        from nvfp4cli.kernels.quantize_triton import fused_quantize_triton

        return fused_quantize_triton(
            x,
            multiplier,
            up=up,
            hadamard=hadamard,
            signs=signs,
            swizzled_scales=swizzled_scales,
        )
    return _encode(_fused_input(x, up, hadamard, signs), multiplier, swizzled_scales)


def fused_amax(
    x: Tensor, *, up: Tensor | None = None, hadamard: int = 1, signs: Tensor | None = None
) -> Tensor:
    """Largest magnitude of what `fused_quantize` encodes, fp32 [] on x's device, not waited for.

    NaN where a value is NaN, otherwise Inf where one is infinite.
    """
    _check_fused(x, up, hadamard, signs)
    if x.is_cuda:
        from nvfp4cli.kernels.amax_triton import amax_triton

        return amax_triton(x, up=up, hadamard=hadamard, signs=signs)
    return torch.tensor(amax(_fused_input(x, up, hadamard, signs)))


def hadamard(x: Tensor, dense: Tensor | None = None) -> Tensor:
    """Rotate whole rows: `rotation.hadamard_rows`, rounded once to x's dtype.

    x: [N, K] bf16, fp16 or fp32, any strides. K = 2^k from 16, or m 2^k from 4 m with dense: int8
    [m, m], entries +-1, on x's device. On a GPU K is at most 32768 and m at most 256; raises
    UnsupportedError beyond, ValueError for a K that does not fit.
    """
    _check_rows(x, dense, None)
    if x.is_cuda:
        from nvfp4cli.kernels import hadamard_triton

        return hadamard_triton.hadamard(x, dense)
    return rotation.hadamard_rows(x, dense).to(x.dtype)


def hadamard_quantize(
    x: Tensor,
    multiplier: Tensor,
    dense: Tensor | None = None,
    up: Tensor | None = None,
    swizzled_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate whole rows and encode them in one pass; for R4, of SiLU(x) * up.

    x, dense: as of `hadamard`. multiplier, up, swizzled_scales and what is returned: as of
    `fused_quantize`.
    """
    _check_rows(x, dense, up)
    nvfp4.check_blocks(x.shape)
    if x.is_cuda:
        from nvfp4cli.kernels import hadamard_triton

        return hadamard_triton.hadamard_quantize(x, multiplier, dense, up, swizzled_scales)
    gated = x if up is None else rotation.silu_mul(x, up)
    return _encode(rotation.hadamard_rows(gated, dense), multiplier, swizzled_scales)


def hadamard_amax(x: Tensor, dense: Tensor | None = None, up: Tensor | None = None) -> Tensor:
    """Largest magnitude of what `hadamard_quantize` encodes, fp32 [] on x's device, not waited for.

    NaN where a rotated value is NaN or Inf.
    """
    _check_rows(x, dense, up)
    if x.is_cuda:
        from nvfp4cli.kernels import hadamard_triton

        return hadamard_triton.hadamard_amax(x, dense, up)
    gated = x if up is None else rotation.silu_mul(x, up)
    found = torch.tensor(amax(rotation.hadamard_rows(gated, dense)))
    return torch.where(found.isinf(), torch.nan, found)


def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
    """`formats.nvfp4.dequantize`, rounded once more to `dtype`: bf16, fp16 or fp32 [N, K]."""
    if q.packed.is_cuda:
        from nvfp4cli.kernels import dequantize_triton

        return dequantize_triton.dequantize(q, dtype)
    return nvfp4.dequantize(q).to(dtype)


def quantize_dequantize(x: Tensor, multiplier: Tensor, *, hadamard: int = 1) -> Tensor:
    """What NVFP4 leaves of activations, [N, K] of x's dtype; they stay rotated.

    x, multiplier, hadamard: as of `fused_quantize`.
    """
    _check_fused(x, None, hadamard, None)
    if x.is_cuda:
        from nvfp4cli.kernels import dequantize_triton

        return dequantize_triton.quantize_dequantize(x, multiplier, hadamard=hadamard)
    scale = _scale(multiplier)
    return nvfp4.dequantize(quantize(_fused_input(x, None, hadamard, None), scale)).to(x.dtype)


def quantize_mxfp4(x: Tensor, *, hadamard: int = 1) -> mxfp4.Quantized:
    """Round a matrix to MXFP4, rotated first if asked; the bits of `formats.mxfp4.quantize`.

    x: [N, K] bf16, fp16 or fp32, finite, K a multiple of 32 and of `hadamard`.
    """
    _check_fused(x, None, hadamard, None)
    mxfp4.check_blocks(x.shape)
    if x.is_cuda:
        from nvfp4cli.kernels import mxfp4_triton

        return mxfp4_triton.quantize_mxfp4(x, hadamard=hadamard)
    return mxfp4.quantize(_fused_input(x, None, hadamard, None))


def dequantize_mxfp4(q: mxfp4.Quantized, dtype: torch.dtype) -> Tensor:
    """`formats.mxfp4.dequantize`, rounded once more to `dtype`: bf16, fp16 or fp32 [N, K]."""
    if q.packed.is_cuda:
        from nvfp4cli.kernels import mxfp4_triton

        return mxfp4_triton.dequantize_mxfp4(q, dtype)
    return mxfp4.dequantize(q).to(dtype)


def quantize_dequantize_mxfp4(x: Tensor, *, hadamard: int = 1) -> Tensor:
    """What MXFP4 leaves of activations, [N, K] of x's dtype; they stay rotated."""
    _check_fused(x, None, hadamard, None)
    mxfp4.check_blocks(x.shape)
    if x.is_cuda:
        from nvfp4cli.kernels import mxfp4_triton

        return mxfp4_triton.quantize_dequantize_mxfp4(x, hadamard=hadamard)
    return mxfp4.dequantize(mxfp4.quantize(_fused_input(x, None, hadamard, None))).to(x.dtype)


def _encode(x: Tensor, multiplier: Tensor, swizzled_scales: bool) -> tuple[Tensor, Tensor]:
    q = quantize(x, _scale(multiplier))
    return q.packed, swizzle.swizzle(q.block_scale) if swizzled_scales else q.block_scale


def _scale(multiplier: Tensor) -> GlobalScale:
    """For encoding, which reads the multiplier alone."""
    return GlobalScale(multiplier.item(), 1 / multiplier.item())


def _fused_input(x: Tensor, up: Tensor | None, hadamard: int, signs: Tensor | None) -> Tensor:
    gated = x if up is None else rotation.silu_mul(x, up)
    return gated if hadamard == 1 else rotation.block_hadamard(gated, hadamard, signs)


def _check_fused(x: Tensor, up: Tensor | None, hadamard: int, signs: Tensor | None) -> None:
    nvfp4.check_blocks(x.shape)
    if hadamard not in (1, *rotation.BLOCKS) or x.shape[1] % hadamard:
        raise ValueError(f"rows of {x.shape[1]} cannot be rotated in blocks of {hadamard}")
    if up is not None and (up.shape, up.dtype) != (x.shape, x.dtype):
        raise ValueError(f"gate and up differ: {list(x.shape)} {x.dtype}, {list(up.shape)}")
    if signs is not None and (hadamard == 1 or signs.shape != (hadamard,)):
        raise ValueError(f"{list(signs.shape)} signs for a rotation in blocks of {hadamard}")


def _check_rows(x: Tensor, dense: Tensor | None, up: Tensor | None) -> None:
    order = 1 if dense is None else len(dense)
    power = x.shape[1] // order
    if x.shape[1] % order or power & (power - 1) or x.shape[1] < 16:
        raise ValueError(f"rows of {x.shape[1]} are not {order} times a power of two, or too short")
    if up is not None and (up.shape, up.dtype) != (x.shape, x.dtype):
        raise ValueError(f"gate and up differ: {list(x.shape)} {x.dtype}, {list(up.shape)}")
