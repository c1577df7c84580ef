"""NVFP4 encoding in Triton: load, rotate, find block maxima, scale and pack in one pass.

A thread holds one whole block of 16 in registers, so that up to the 16-point rotation nothing is
exchanged between threads. Not memory is the limit but instructions: 14 for a value keep the time
within a twentieth of a copy's on an H200 (scripts/bench_kernels.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats import swizzle
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized, check_blocks
from nvfp4cli.kernels.load_triton import factors, load_block, pairs
from nvfp4cli.kernels.numbers_triton import (
    block_scale,
    block_scale_ptx,
    in_ptx,
    is_fast,
    pack_block,
)
from nvfp4cli.kernels.tiles_triton import (
    block_amax,
    store_one,
    store_swizzled,
    store_words,
    tile,
    tiles,
)

TILE = 128  # blocks of a program; any power of two from 32 on gives the same bytes
_GATED_TILE = 64  # which twice the values are loaded for


@triton.jit
def _quantize_kernel(
    x_ptr,  # pairs [N, K/2]
    up_ptr,  # pairs [N, K/2], read if GATED
    packed_ptr,  # int32 [N, K/8]
    scale_ptr,  # uint8 [N, K/16], or swizzled tiles
    multiplier_ptr,  # fp32 [1]
    signs_ptr,  # fp32 [HADAMARD], read if SIGNED
    n,
    blocks_per_row,
    row_stride,  # in pairs
    up_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,  # programs cover the matrix exactly
    SWIZZLED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SIGNED: tl.constexpr,
    HADAMARD: tl.constexpr,
    EARLY: tl.constexpr,  # factor of the rotated values
    LATE: tl.constexpr,  # factor, a power of two, that is applied through the scales
    EXACT_SIGNS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Each program encodes COLUMNS blocks of each of ROWS rows; programs go along the rows.

    A swizzled launch covers the padding too, where the maximum of a block is 0 and so its byte.
    """
    row, column, inside = tile(n, blocks_per_row, COLUMNS, ROWS)
    # Before the block, whose loads it would wait for otherwise: 8 % of the time.
    multiplier = tl.load(multiplier_ptr)
    inverse = tl.div_rn(1.0, multiplier)
    x_place = x_ptr + (row * row_stride + column * 8)
    up_place = up_ptr + (row * up_stride + column * 8)
    a, b, c, d = load_block(
        x_place, up_place, signs_ptr, column, inside, EVEN, KIND, GATED, SIGNED, HADAMARD, PTX
    )
    if EARLY != 1:
        a, b, c, d = a * EARLY, b * EARLY, c * EARLY, d * EARLY

    amax = block_amax(a, b, c, d, PTX)
    if PTX:
        HALF: tl.constexpr = 1.0 if EXACT_SIGNS else 0.5
        if is_fast(multiplier):
            byte, factor = block_scale_ptx(amax, multiplier, inverse, LATE, HALF)
        else:
            byte, factor = block_scale(amax * LATE, multiplier)
            a, b, c, d = a * LATE, b * LATE, c * LATE, d * LATE
            if not EXACT_SIGNS:
                a, b = _halve(a, factor), _halve(b, factor)
                c, d = _halve(c, factor), _halve(d, factor)
                factor = tl.where(factor > 1, factor * HALF, factor)
    else:
        byte, factor = block_scale(amax, multiplier)

    block = row * blocks_per_row + column
    codes = pack_block(a, b, c, d, factor, EXACT_SIGNS, PTX)
    store_words(packed_ptr + block * 2, codes, inside, EVEN)
    if SWIZZLED:
        store_swizzled(scale_ptr, byte.to(tl.uint8), n, blocks_per_row, COLUMNS, ROWS, EVEN)
    else:
        store_one(scale_ptr + block, byte.to(tl.uint8), inside, EVEN)


@triton.jit
def _halve(x, factor):
    """x such that its product with `factor`, or with half of it above 1, is y / 2; 0 where y is.

    Half of a small factor or of a small value would be subnormal and lose a bit.
    """
    factor = factor[:, None]
    return tl.where(x * factor == 0, 0.0, tl.where(factor > 1, x, x * 0.5))


def quantize_triton(weight: Tensor, scale: GlobalScale) -> Quantized:
    """Round a matrix to NVFP4, bit for bit as `formats.nvfp4.quantize` does.

    weight: [N, K] bf16, fp16 or fp32, any strides, finite, K a multiple of 16, on a CUDA device
    (under TRITON_INTERPRET=1 on the CPU). Nothing waits for the device.
    """
    multiplier = torch.full((1,), scale.multiplier, device=weight.device)
    packed, block_scale_ = fused_quantize_triton(weight, multiplier)
    return Quantized(packed, block_scale_, scale)


def fused_quantize_triton(
    x: Tensor,
    multiplier: Tensor,
    *,
    up: Tensor | None = None,
    hadamard: int = 1,
    signs: Tensor | None = None,
    swizzled_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """`kernels.fused_quantize` on a CUDA device (under TRITON_INTERPRET=1 on the CPU)."""
    n, k = check_blocks(x.shape)
    kb = k // BLOCK
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=x.device)
    shape = swizzle.padded_shape(n, kb) if swizzled_scales else (n, kb)
    scale_byte = torch.empty(shape, dtype=torch.uint8, device=x.device)
    if scale_byte.numel() == 0:
        return packed, scale_byte.view(torch.float8_e4m3fn)
    words, row_stride, kind = pairs(x)
    up_words, up_stride, _ = (words, row_stride, kind) if up is None else pairs(up)
    shared = tiles(*shape, TILE if up is None else min(TILE, _GATED_TILE))
    ptx = in_ptx(_quantize_kernel)
    early, late = factors(hadamard, kind, up is not None, ptx)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _quantize_kernel[shared.grid](
            words,
            up_words,
            packed.view(torch.int32),
            scale_byte,
            multiplier,
            multiplier if signs is None else signs.to(torch.float32),
            n,
            kb,
            row_stride,
            up_stride,
            COLUMNS=shared.columns,
            ROWS=shared.rows,
            EVEN=shared.even and shape == (n, kb),
            SWIZZLED=swizzled_scales,
            KIND=kind,
            GATED=up is not None,
            SIGNED=signs is not None,
            HADAMARD=hadamard,
            EARLY=early,
            LATE=late,
            EXACT_SIGNS=kind == "fp32" and up is None,
            PTX=ptx,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return packed, scale_byte.view(torch.float8_e4m3fn)
