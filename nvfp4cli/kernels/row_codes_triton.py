"""NVFP4 codes and scales of rows that `rows_triton` has rotated: a thread holds whole blocks."""

import triton
import triton.language as tl

from nvfp4cli.kernels.numbers_triton import (
    PACK_EXACT,
    PACK_SHORT,
    block_scale,
    block_scale_ptx,
    e2m1_code,
    is_fast,
    reciprocal_ptx,
)
from nvfp4cli.kernels.rows_triton import registers, run_start
from nvfp4cli.kernels.tiles_triton import store_one


@triton.jit
def encode_rows(
    x,  # fp32 [R, T]
    multiplier,
    tile,
    packed_ptr,
    scale_ptr,
    n,
    padded_rows,
    EARLY: tl.constexpr,
    LATE: tl.constexpr,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT_SIGNS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Encode the values that each thread holds of a tile of `rows_triton`.

    EARLY: a factor of the values. LATE: one that is a power of two and goes through the scales.
    """
    if EARLY != 1:
        x *= EARLY
    row, column = run_start(tile, SIZE, ORDER, R, T)
    packed = row.to(tl.int64) * (SIZE * ORDER // 8) + column // 8
    scale = _scale_place(row, column // 16, SIZE * ORDER // 16, SWIZZLED) // min(R // 16, 4)
    target = packed_ptr + packed, scale_ptr + scale, row < n, row < padded_rows
    values = registers(x, R, T)
    if PTX:
        # With a multiplier below 1, no value that is a sum of bf16 or fp16 values becomes -0.
        if is_fast(multiplier) & (multiplier < 1):
            # The scales of values that lack the factor LATE are those of larger units.
            _encode(values, multiplier * (1 / LATE), target, SWIZZLED, EVEN, EXACT_SIGNS, "fast")
        else:
            scaled = values[:0]
            for i in tl.static_range(R):
                scaled += (values[i] * LATE,)
            _encode(scaled, multiplier, target, SWIZZLED, EVEN, True, "exact")
    else:
        _encode(values, multiplier, target, SWIZZLED, EVEN, True, "portable")


@triton.jit
def _scale_place(row, block, BLOCKS: tl.constexpr, SWIZZLED: tl.constexpr):
    """Offset, int64, of the scale of a block in a row of BLOCKS."""
    wide = row.to(tl.int64)
    if SWIZZLED:
        tile = wide // 128 * ((BLOCKS + 3) // 4) + block // 4
        return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    else:
        return wide * BLOCKS + block


@triton.jit
def _encode(
    values,  # R times fp32 [T]
    multiplier,
    target,  # places of a thread's first codes and scales, and which of them to write: each [T]
    SWIZZLED: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT_SIGNS: tl.constexpr,
    PATH: tl.constexpr,
):
    """Store codes and scales of R/16 blocks a thread, as many as fit a store at a time."""
    packed_place, scale_place, inside, padded = target
    R: tl.constexpr = len(values)
    G: tl.constexpr = min(R // 16, 4)  # scale bytes in a store
    STEP: tl.constexpr = 512 // 4 if SWIZZLED else 1  # to a thread's next four bytes, in fours
    HALF: tl.constexpr = 1.0 if EXACT_SIGNS else 0.5
    if PATH == "fast":
        inverse = reciprocal_ptx(multiplier)
    for b in tl.static_range(R // 16):
        amax = tl.abs(values[16 * b])
        for i in tl.static_range(1, 16):
            amax = tl.maximum(amax, tl.abs(values[16 * b + i]))
        if PATH == "fast":
            byte, factor = block_scale_ptx(amax, multiplier, inverse, 1.0, HALF)
        else:
            byte, factor = block_scale(amax, multiplier)
        low = _word(values, 16 * b, factor, EXACT_SIGNS, PATH != "portable")
        high = _word(values, 16 * b + 8, factor, EXACT_SIGNS, PATH != "portable")
        if R == 16:
            _store_words(packed_place, tl.join(low, high), inside, EVEN)
        elif b % 2 == 0:
            first_low, first_high = low, high
        else:
            four = tl.join(tl.join(first_low, low), tl.join(first_high, high))
            four = tl.reshape(four, (four.shape[0], 4))
            _store_words(packed_place + (b - 1) * 2, four, inside, EVEN)
        if b % G == 0:
            joined = byte
        else:
            joined |= byte << (b % G * 8)
        if b % G == G - 1:
            stored = joined.to(scale_place.dtype.element_ty)
            store_one(scale_place + b // G * STEP, stored, padded, EVEN)


@triton.jit
def _word(v, F: tl.constexpr, factor, EXACT_SIGNS: tl.constexpr, PTX: tl.constexpr):
    """Eight codes, int32 [T], of the values from v[F] on; factor as in `pack_block`."""
    if PTX:
        evens_odds = [v[F], v[F + 2], v[F + 4], v[F + 6], v[F + 1], v[F + 3], v[F + 5], v[F + 7]]
        return tl.inline_asm_elementwise(
            PACK_EXACT if EXACT_SIGNS else PACK_SHORT,
            "=r,r,r,r,r,r,r,r,r,r",
            evens_odds + [factor],  # noqa: RUF005
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        word = e2m1_code(v[F] * factor)
        for i in tl.static_range(1, 8):
            word |= e2m1_code(v[F + i] * factor) << (4 * i)
        return word


@triton.jit
def _store_words(place, words, inside, EVEN: tl.constexpr):
    places = place[:, None] + tl.arange(0, words.shape[1])[None, :]
    if EVEN:
        tl.store(places, words)
    else:
        tl.store(places, words, mask=inside[:, None])
