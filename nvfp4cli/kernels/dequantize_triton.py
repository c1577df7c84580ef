"""NVFP4 decoding in Triton, alone and straight behind the encoding of the same values.

`dequantize` reads a word of eight codes and writes 16 bytes (of fp32 32) in each thread.
`quantize_dequantize` never makes codes: it rounds to E2M1's values where they lie, in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats.nvfp4 import BLOCK, Quantized, check_blocks
from nvfp4cli.kernels.load_triton import KINDS, factors, load_block, pairs
from nvfp4cli.kernels.numbers_triton import block_scale, block_scale_ptx, in_ptx, is_fast
from nvfp4cli.kernels.tiles_triton import block_amax, run, store_words, swizzled, tile, tiles

WORDS = 1024  # of eight codes, of a program of `dequantize`; a power of two, as is TILE
TILE = 256  # blocks of a program of `quantize_dequantize`

_STEPS = tl.constexpr(1.5 * 2**22)  # P * 1.5 * 2^22 has P/2 as its unit in the last place
# In fp32's sign, exponent and mantissa, as int32: 0x81C00000 and 0x87F00000.
_CODE_BITS = tl.constexpr(-0x7E400000)
_E4M3_BITS = tl.constexpr(-0x78100000)
_TO_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_TO_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@triton.jit
def decode_word(word):
    """int32 [T] of eight codes -> fp32 values of the even and of the odd elements, [T, 4] each."""
    shift = 28 - 8 * tl.arange(0, 4)[None, :]
    return _decode(word[:, None] << shift), _decode(word[:, None] << (shift - 4))


@triton.jit
def _decode(top):
    """int32 whose four top bits are a code -> fp32 value.

    The code in the places of fp32's sign, last exponent bits and first mantissa bit is the value
    * 2^-126, of code 1 too, which is subnormal in both formats.
    """
    return ((top >> 6) & _CODE_BITS).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def round_block(a, b, c, d, reciprocal, EXACT_SIGNS: tl.constexpr):
    """Four fp32 [T, 4] -> nearest values of E2M1 in code units; a product that is -0 gives 0.

    reciprocal: [T], from value to code units. Not EXACT_SIGNS: no product may round to zero.
    """
    factor = reciprocal[:, None]
    if EXACT_SIGNS:
        a, b, c, d = a * factor + 0.0, b * factor + 0.0, c * factor + 0.0, d * factor + 0.0
    else:
        a, b = tl.fma(a, factor, 0.0), tl.fma(b, factor, 0.0)
        c, d = tl.fma(c, factor, 0.0), tl.fma(d, factor, 0.0)
    return _round_to_e2m1(a), _round_to_e2m1(b), _round_to_e2m1(c), _round_to_e2m1(d)


@triton.jit
def _flush(a, b, c, d, reciprocal):
    """Four fp32 [T, 4] with 0 for what the reciprocal [T] turns into 0 or -0."""
    factor = reciprocal[:, None]
    a, b = tl.where(a * factor == 0, 0.0, a), tl.where(b * factor == 0, 0.0, b)
    c, d = tl.where(c * factor == 0, 0.0, c), tl.where(d * factor == 0, 0.0, d)
    return a, b, c, d


@triton.jit
def _round_to_e2m1(y):
    """fp32 in code units, not -0 -> nearest value of E2M1, ties to the even code, sign of y.

    With P the power of two below |y|, at least 1, E2M1's step there is P / 2, which is the unit in
    the last place of every number of P * [2^22, 2^23).
    """
    a = tl.minimum(tl.abs(y), 6.0)
    power = tl.maximum(
        (a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0
    )
    rounded = tl.fma(power, -_STEPS, tl.fma(power, _STEPS, a))
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def store_pairs(
    place, even, odd, inside, EVEN: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr
):
    """Round fp32 [T, 4] each to KIND, nearest-even, and store them as four words of each thread."""
    if KIND == "fp32":
        low = even.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        words = low | (odd.to(tl.int32, bitcast=True).to(tl.int64) << 32)
    elif PTX:
        CONVERT: tl.constexpr = _TO_BF16 if KIND == "bf16" else _TO_FP16
        words = tl.inline_asm_elementwise(
            CONVERT, "=r,r,r", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        words = _half_bits(even, KIND) | (_half_bits(odd, KIND) << 16)
    store_words(place, words, inside, EVEN)


@triton.jit
def _half_bits(x, KIND: tl.constexpr):
    """fp32 -> bits of the nearest bf16 or fp16 as int32. The interpreter's own bf16 is cut off."""
    if KIND == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded) & 0xFFFF
    else:
        return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _e4m3_value(byte):
    """int8 of any E4M3 byte -> fp32; 0x7F and 0xFF become NaN. Exact, of subnormals too."""
    wide = byte.to(tl.int32)
    value = ((wide << 20) & _E4M3_BITS).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _dequantize_kernel(
    packed_ptr,  # int32 [N, K/8]
    scale_ptr,  # int8 [N, K/16], or swizzled tiles
    out_ptr,  # pairs [N, K/2]
    multiplier,
    n,
    words_per_row,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    SWIZZLED: tl.constexpr,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
):
    if SWIZZLED:
        row, column, inside = tile(n, words_per_row, COLUMNS, ROWS)
        place = row * words_per_row + column
        scale_place = swizzled(row, column // 2, words_per_row // 2)
    else:
        place, inside = run(tl.cast(n, tl.int64) * words_per_row, COLUMNS * ROWS)
        scale_place = place // 2
    if EVEN:
        word = tl.load(packed_ptr + place, eviction_policy="evict_first")
        byte = tl.load(scale_ptr + scale_place)
    else:
        word = tl.load(packed_ptr + place, mask=inside, other=0, eviction_policy="evict_first")
        byte = tl.load(scale_ptr + scale_place, mask=inside, other=0)
    scale = _e4m3_value(byte)[:, None]
    even, odd = decode_word(word)
    # A code times a block scale has six significant bits: exact. One rounding is left.
    even, odd = even * scale * multiplier, odd * scale * multiplier
    store_pairs(out_ptr + place * 4, even, odd, inside, EVEN, KIND, PTX)


@triton.jit
def _quantize_dequantize_kernel(
    x_ptr,  # pairs [N, K/2]
    out_ptr,  # pairs [N, K/2], contiguous
    multiplier_ptr,  # fp32 [1]
    n,
    blocks_per_row,
    row_stride,  # in pairs
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    OUT_KIND: tl.constexpr,
    HADAMARD: tl.constexpr,
    EARLY: tl.constexpr,  # factors of the rotated values and of their scales
    LATE: tl.constexpr,
    PTX: tl.constexpr,
):
    row, column, inside = tile(n, blocks_per_row, COLUMNS, ROWS)
    multiplier = tl.load(multiplier_ptr)
    inverse = tl.div_rn(1.0, multiplier)
    x_place = x_ptr + (row * row_stride + column * 8)
    a, b, c, d = load_block(
        x_place, x_place, x_ptr, column, inside, EVEN, KIND, False, False, HADAMARD, PTX
    )
    if EARLY != 1:
        a, b, c, d = a * EARLY, b * EARLY, c * EARLY, d * EARLY
    EXACT_SIGNS: tl.constexpr = KIND == "fp32" or not PTX

    if PTX:
        if is_fast(multiplier):
            byte, reciprocal = block_scale_ptx(
                block_amax(a, b, c, d, PTX), multiplier, inverse, LATE, 1.0
            )
        else:
            a, b, c, d = a * LATE, b * LATE, c * LATE, d * LATE
            byte, reciprocal = block_scale(block_amax(a, b, c, d, PTX), multiplier)
            a, b, c, d = _flush(a, b, c, d, reciprocal)
    else:
        byte, reciprocal = block_scale(block_amax(a, b, c, d, PTX), multiplier)
    scale = _e4m3_value(byte)[:, None]
    a, b, c, d = round_block(a, b, c, d, reciprocal, EXACT_SIGNS)
    a, b, c, d = a * scale, b * scale, c * scale, d * scale  # exact, as in `_dequantize_kernel`
    a, b, c, d = a * multiplier, b * multiplier, c * multiplier, d * multiplier
    place = out_ptr + (row * blocks_per_row + column) * 8
    store_pairs(place, a, b, inside, EVEN, OUT_KIND, PTX)
    store_pairs(place + 4, c, d, inside, EVEN, OUT_KIND, PTX)


def dequantize(q: Quantized, dtype: torch.dtype, *, swizzled_scales: bool = False) -> Tensor:
    """[N, K]: `formats.nvfp4.dequantize`, rounded once more to bf16 or fp16 if dtype is that.

    q: on a CUDA device (under TRITON_INTERPRET=1 on the CPU), K a multiple of 16; the block scales
    linear, or where `swizzled_scales` in the order of `formats.swizzle`, in any shape. A scale that
    is NaN gives NaN.
    """
    n, k = check_blocks(q.shape)
    out = torch.empty(n, k, dtype=dtype, device=q.packed.device)
    if out.numel() == 0:
        return out
    words = q.packed.contiguous().view(torch.int32)
    shared = tiles(n, words.shape[1], WORDS)
    along = triton.cdiv(words.numel(), WORDS)
    with torch.cuda.device_of(words):  # Triton launches on the current device
        _dequantize_kernel[shared.grid if swizzled_scales else (along,)](
            words,
            q.block_scale.contiguous().view(torch.int8),
            pairs(out).words,
            q.global_scale.multiplier,
            n,
            words.shape[1],
            COLUMNS=shared.columns,
            ROWS=shared.rows,
            EVEN=shared.even if swizzled_scales else words.numel() % WORDS == 0,
            SWIZZLED=swizzled_scales,
            KIND=KINDS[dtype],
            PTX=in_ptx(_dequantize_kernel),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def quantize_dequantize(
    x: Tensor, multiplier: Tensor, dtype: torch.dtype | None = None, *, hadamard: int = 1
) -> Tensor:
    """What is left of x after NVFP4: `dequantize(quantize(x))` of `formats.nvfp4`, in one pass.

    x: [N, K] bf16, fp16 or fp32, finite, on a CUDA device (under TRITON_INTERPRET=1 on the CPU),
    copied first if its rows are not of unit stride; K a multiple of 16 and of `hadamard`.
    multiplier: the global scale, fp32 [1] on the same device; nothing waits for it. hadamard: 1, or
    the size of `rotation.block_hadamard`, 16 to 128, which x is rotated by first; so stays the
    answer. Returns [N, K] of dtype, or of x's, rounded from fp32. Raises ValueError where K has no
    whole blocks of 16.
    """
    n, k = check_blocks(x.shape)
    out = torch.empty(n, k, dtype=dtype or x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    words, row_stride, kind = pairs(x)
    ptx = in_ptx(_quantize_dequantize_kernel)
    early, late = factors(hadamard, kind, False, ptx)
    shared = tiles(n, k // BLOCK, TILE)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _quantize_dequantize_kernel[shared.grid](
            words,
            pairs(out).words,
            multiplier,
            n,
            k // BLOCK,
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
