"""MXFP4 in Triton, to and from bytes and straight through: the bits of `formats.mxfp4`.

Built as NVFP4's kernels are: a thread holds 16 values, here half a block, and asks its neighbour
for the maximum of the other half. The scale is a power of two, which its byte spells out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats import mxfp4
from nvfp4cli.formats.mxfp4 import BLOCK, Quantized
from nvfp4cli.kernels import dequantize_triton
from nvfp4cli.kernels.dequantize_triton import (
    decode_word,
    round_block,
    store_pairs,
)
from nvfp4cli.kernels.load_triton import KINDS, factors, load_block, pairs
from nvfp4cli.kernels.numbers_triton import in_ptx, pack_block
from nvfp4cli.kernels.tiles_triton import block_amax, run, store_words, tile, tiles

_HALF = 16  # values of a thread


@triton.jit
def _scale(a, b, c, d, FACTOR: tl.constexpr, PTX: tl.constexpr):
    """Byte and reciprocal of the scales of four fp32 [T, 4], two rows a block: int32, fp32 [T].

    FACTOR: a power of two that has not been applied to the values; the reciprocal is multiplied by
    it. Of a finite maximum the byte is at most 252, and so the reciprocal at least 2^-125.
    """
    amax = block_amax(a, b, c, d, PTX)
    blocks: tl.constexpr = amax.shape[0] // 2
    amax = tl.max(tl.reshape(amax, (blocks, 2)), axis=1) * FACTOR
    byte = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)
    byte = tl.reshape(tl.broadcast_to(byte[:, None], (blocks, 2)), (2 * blocks,))
    return byte, ((254 - byte) << 23).to(tl.float32, bitcast=True) * FACTOR


@triton.jit
def _value(byte):
    """`mxfp4.decode`: int32 -> fp32; byte 0 is 2^-127, a subnormal, 255 is NaN."""
    bits = tl.where(byte > 0, byte << 23, 1 << 22)
    return tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _quantize_kernel(
    x_ptr,  # pairs [N, K/2]
    packed_ptr,  # int32 [N, K/8]
    scale_ptr,  # uint8 [N, K/32]
    n,
    halves_per_row,
    row_stride,  # in pairs
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    HADAMARD: tl.constexpr,
    EARLY: tl.constexpr,  # factors of the rotated values and of what is derived from them
    LATE: tl.constexpr,
    PTX: tl.constexpr,
):
    row, column, inside = tile(n, halves_per_row, COLUMNS, ROWS)
    x_place = x_ptr + (row * row_stride + column * 8)
    a, b, c, d = load_block(
        x_place, x_place, x_ptr, column, inside, EVEN, KIND, False, False, HADAMARD, PTX
    )
    if EARLY != 1:
        a, b, c, d = a * EARLY, b * EARLY, c * EARLY, d * EARLY
    byte, reciprocal = _scale(a, b, c, d, LATE, PTX)
    half = row * halves_per_row + column
    # A value far below its block's largest can become -0 here, which is code 0: exact signs.
    codes = pack_block(a, b, c, d, reciprocal, True, PTX)
    store_words(packed_ptr + half * 2, codes, inside, EVEN)
    tl.store(scale_ptr + half // 2, byte.to(tl.uint8), mask=inside & (column % 2 == 0))


@triton.jit
def _quantize_dequantize_kernel(
    x_ptr,  # pairs [N, K/2]
    out_ptr,  # pairs [N, K/2], contiguous
    n,
    halves_per_row,
    row_stride,  # in pairs
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    OUT_KIND: tl.constexpr,
    HADAMARD: tl.constexpr,
    EARLY: tl.constexpr,  # factors of the rotated values and of what is derived from them
    LATE: tl.constexpr,
    PTX: tl.constexpr,
):
    row, column, inside = tile(n, halves_per_row, COLUMNS, ROWS)
    x_place = x_ptr + (row * row_stride + column * 8)
    a, b, c, d = load_block(
        x_place, x_place, x_ptr, column, inside, EVEN, KIND, False, False, HADAMARD, PTX
    )
    if EARLY != 1:
        a, b, c, d = a * EARLY, b * EARLY, c * EARLY, d * EARLY
    byte, reciprocal = _scale(a, b, c, d, LATE, PTX)
    a, b, c, d = round_block(a, b, c, d, reciprocal, True)
    scale = _value(byte)[:, None]
    place = out_ptr + (row * halves_per_row + column) * 8
    store_pairs(place, a * scale, b * scale, inside, EVEN, OUT_KIND, PTX)
    store_pairs(place + 4, c * scale, d * scale, inside, EVEN, OUT_KIND, PTX)


@triton.jit
def _dequantize_kernel(
    packed_ptr,  # int32 [N, K/8]
    scale_ptr,  # uint8 [N, K/32]
    out_ptr,  # pairs [N, K/2]
    words,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
):
    place, inside = run(words, SIZE)
    word = tl.load(packed_ptr + place, mask=inside, other=0, eviction_policy="evict_first")
    byte = tl.load(scale_ptr + place // 4, mask=inside, other=0).to(tl.int32)
    scale = _value(byte)[:, None]
    even, odd = decode_word(word)
    store_pairs(out_ptr + place * 4, even * scale, odd * scale, inside, False, KIND, PTX)


def quantize_mxfp4(x: Tensor, *, hadamard: int = 1) -> Quantized:
    """Round a matrix to MXFP4, bit for bit as `formats.mxfp4.quantize` does.

    x: [N, K] bf16, fp16 or fp32, finite, on a CUDA device (under TRITON_INTERPRET=1 on the CPU),
    copied first if its rows are not of unit stride; K a multiple of 32 and of `hadamard`, which is
    1 or the size of the `rotation.block_hadamard`, 16 to 128, that x goes through first. Raises
    ValueError where K has no whole blocks of 32.
    """
    n, k = mxfp4.check_blocks(x.shape)
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=x.device)
    scale_byte = torch.empty(n, k // BLOCK, dtype=torch.uint8, device=x.device)
    if packed.numel() == 0:
        return Quantized(packed, scale_byte)
    words, row_stride, kind = pairs(x)
    ptx = in_ptx(_quantize_kernel)
    early, late = factors(hadamard, kind, False, ptx)
    shared = tiles(n, k // _HALF, dequantize_triton.TILE)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _quantize_kernel[shared.grid](
            words,
            packed.view(torch.int32),
            scale_byte,
            n,
            k // _HALF,
            row_stride,
            COLUMNS=shared.columns,
            ROWS=shared.rows,
            EVEN=shared.even,
            KIND=kind,
            HADAMARD=hadamard,
            EARLY=early,
            LATE=late,
            PTX=ptx,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return Quantized(packed, scale_byte)


def quantize_dequantize_mxfp4(
    x: Tensor, dtype: torch.dtype | None = None, *, hadamard: int = 1
) -> Tensor:
    """What is left of x after MXFP4: `dequantize(quantize(x))` of `formats.mxfp4`, in one pass.

    x, hadamard: as for `quantize_mxfp4`; the answer stays rotated. Returns [N, K] of dtype, or of
    x's, rounded from fp32.
    """
    n, k = mxfp4.check_blocks(x.shape)
    out = torch.empty(n, k, dtype=dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    words, row_stride, kind = pairs(x)
    ptx = in_ptx(_quantize_dequantize_kernel)
    early, late = factors(hadamard, kind, False, ptx)
    shared = tiles(n, k // _HALF, dequantize_triton.TILE)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _quantize_dequantize_kernel[shared.grid](
            words,
            pairs(out).words,
            n,
            k // _HALF,
            row_stride,
            COLUMNS=shared.columns,
            ROWS=shared.rows,
            EVEN=shared.even,
            KIND=kind,
            OUT_KIND=KINDS[out.dtype],
            HADAMARD=hadamard,
            EARLY=early,
            LATE=late,
            PTX=ptx,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def dequantize_mxfp4(q: Quantized, dtype: torch.dtype) -> Tensor:
    """[N, K]: `formats.mxfp4.dequantize`, rounded once more to bf16 or fp16 if dtype is that.

    q: on a CUDA device (under TRITON_INTERPRET=1 on the CPU), K a multiple of 32. The scale byte
    255 gives NaN.
    """
    n, k = mxfp4.check_blocks(q.shape)
    out = torch.empty(n, k, dtype=dtype, device=q.packed.device)
    if out.numel() == 0:
        return out
    words = q.packed.contiguous().view(torch.int32)
    size = dequantize_triton.WORDS
    with torch.cuda.device_of(words):  # Triton launches on the current device
        _dequantize_kernel[triton.cdiv(words.numel(), size),](
            words,
            q.block_scale.contiguous(),
            pairs(out).words,
            words.numel(),
            SIZE=size,
            KIND=KINDS[dtype],
            PTX=in_ptx(_dequantize_kernel),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
