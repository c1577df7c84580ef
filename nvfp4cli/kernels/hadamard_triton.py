"""Whole-row Walsh-Hadamard transforms in Triton: alone, into NVFP4, or for the maximum of that.

Each is one pass: what is rotated lies in registers, and only the result is written.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats import rotation, swizzle
from nvfp4cli.formats.nvfp4 import BLOCK, check_blocks
from nvfp4cli.kernels.load_triton import GATED_FACTOR, pairs
from nvfp4cli.kernels.numbers_triton import (
    PACK_EXACT,
    PACK_SHORT,
    block_scale,
    block_scale_ptx,
    e2m1_code,
    in_ptx,
    is_fast,
)
from nvfp4cli.kernels.rows_triton import Tiling, place_of, registers, rotated_rows, tiling

# Integers of the width that holds as many scale bytes as a thread joins.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NAN = tl.constexpr(0x7FC00000)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _hadamard_kernel(
    x_ptr,  # pairs [N, K/2]
    signs_ptr,  # int32 [ORDER, ORDER/4], read if ORDER > 1
    y_ptr,  # [N, K]; int16 for bf16
    n,
    x_stride,  # in pairs
    NORMALIZER: tl.constexpr,
    KIND: tl.constexpr,
    PTX: tl.constexpr,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    LOWS: tl.constexpr,
):
    x = rotated_rows(
        x_ptr, x_ptr, signs_ptr, n, x_stride, x_stride, SIZE, ORDER, R, T, LOWS, KIND, False, PTX
    )
    x *= NORMALIZER
    if KIND == "bf16":
        # With integers: the interpreter's cast truncates. NaN would round to Inf or 0.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where((bits & 0x7FFFFFFF) > _INFINITY, 0x7FC0, rounded).to(tl.int16)
    else:
        y = x.to(y_ptr.dtype.element_ty)
    t = tl.arange(0, T)
    row, _ = place_of(t * R, SIZE, ORDER, R, T)
    place = y_ptr + (tl.program_id(0).to(tl.int64) * (R * T) + t * R)
    tl.store(place[None, :] + tl.arange(0, R)[:, None], y, mask=(row < n)[None, :])


@triton.jit
def _amax_kernel(
    x_ptr,  # pairs [N, K/2]
    up_ptr,  # pairs [N, K/2], read if GATED
    signs_ptr,  # int32 [ORDER, ORDER/4], read if ORDER > 1
    amax_ptr,  # int32 [1], zero
    n,
    x_stride,  # in pairs
    up_stride,
    FACTOR: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PTX: tl.constexpr,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    LOWS: tl.constexpr,
):
    x = rotated_rows(
        x_ptr, up_ptr, signs_ptr, n, x_stride, up_stride, SIZE, ORDER, R, T, LOWS, KIND, GATED, PTX
    )
    # The bits of magnitudes are ordered as they are, with Inf and NaN on top.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(tl.max(bits, axis=0), axis=0)
    # A product with the factor is monotone: it may follow the maximum.
    top = (top.to(tl.float32, bitcast=True) * FACTOR).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr, tl.where(top >= _INFINITY, _NAN, top))


@triton.jit
def _quantize_kernel(
    x_ptr,  # pairs [N, K/2]
    up_ptr,  # pairs [N, K/2], read if GATED
    signs_ptr,  # int32 [ORDER, ORDER/4], read if ORDER > 1
    packed_ptr,  # int32 [N, K/8]
    scale_ptr,  # [N, K/16] or swizzled tiles, in units of the bytes that a thread joins
    multiplier_ptr,  # fp32 [1]
    n,
    padded_rows,  # n, or with the padding of swizzled tiles
    x_stride,  # in pairs
    up_stride,
    EARLY: tl.constexpr,  # factors of the values before the encoder and within it
    LATE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PTX: tl.constexpr,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    LOWS: tl.constexpr,
):
    """A launch covers the padded rows, where the maximum of a block is 0 and so its byte."""
    x = rotated_rows(
        x_ptr, up_ptr, signs_ptr, n, x_stride, up_stride, SIZE, ORDER, R, T, LOWS, KIND, GATED, PTX
    )
    if EARLY != 1:
        x *= EARLY
    t = tl.arange(0, T)
    row, part = place_of(t * R, SIZE, ORDER, R, T)
    block = (part * SIZE + t * R % SIZE) // 16  # in its row
    wide = row.to(tl.int64)
    STEP: tl.constexpr = 512 // 4 if SWIZZLED else 1  # to a thread's next four bytes, in fours
    if SWIZZLED:
        tile = wide // 128 * ((SIZE * ORDER // 16 + 3) // 4) + block // 4
        scale = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    else:
        scale = wide * (SIZE * ORDER // 16) + block
    packed_place = packed_ptr + (tl.program_id(0).to(tl.int64) * T + t) * (R // 8)
    scale_place = scale_ptr + scale // min(R // 16, 4)
    target = packed_place, scale_place, row < n, row < padded_rows
    multiplier = tl.load(multiplier_ptr)
    EXACT: tl.constexpr = KIND == "fp32" and not GATED
    values = registers(x, R, T)
    if PTX:
        # With a multiplier below 1, no value that is a sum of bf16 or fp16 values becomes -0.
        if is_fast(multiplier) & (multiplier < 1):
            _encode(values, multiplier, target, STEP, LATE, EXACT, "fast")
        else:
            scaled = values[:0]
            for i in tl.static_range(R):
                scaled += (values[i] * LATE,)
            _encode(scaled, multiplier, target, STEP, 1.0, True, "exact")
    else:
        _encode(values, multiplier, target, STEP, 1.0, True, "portable")


@triton.jit
def _encode(
    values,  # R times fp32 [T]
    multiplier,
    target,  # places of a thread's first codes and scales, and which of them to write: each [T]
    STEP: tl.constexpr,  # between stores of scales, in stores
    FACTOR: tl.constexpr,
    EXACT_SIGNS: tl.constexpr,
    PATH: tl.constexpr,
):
    """Store codes and scales of R/16 blocks a thread, as many as fit a store at a time."""
    packed_place, scale_place, inside, padded = target
    R: tl.constexpr = len(values)
    G: tl.constexpr = min(R // 16, 4)  # scale bytes in a store
    HALF: tl.constexpr = 1.0 if EXACT_SIGNS else 0.5
    inverse = tl.div_rn(1.0, multiplier)
    for b in tl.static_range(R // 16):
        amax = tl.abs(values[16 * b])
        for i in tl.static_range(1, 16):
            amax = tl.maximum(amax, tl.abs(values[16 * b + i]))
        if PATH == "fast":
            byte, factor = block_scale_ptx(amax, multiplier, inverse, FACTOR, HALF)
        else:
            byte, factor = block_scale(amax, multiplier)
        low = _word(values, 16 * b, factor, EXACT_SIGNS, PATH != "portable")
        high = _word(values, 16 * b + 8, factor, EXACT_SIGNS, PATH != "portable")
        if R == 16:
            _store_words(packed_place, tl.join(low, high), inside)
        elif b % 2 == 0:
            first_low, first_high = low, high
        else:
            four = tl.join(tl.join(first_low, low), tl.join(first_high, high))
            four = tl.reshape(four, (four.shape[0], 4))
            _store_words(packed_place + (b - 1) * 2, four, inside)
        if b % G == 0:
            joined = byte
        else:
            joined |= byte << (b % G * 8)
        if b % G == G - 1:
            stored = joined.to(scale_place.dtype.element_ty)
            tl.store(scale_place + b // G * STEP, stored, mask=padded)


@triton.jit
def _word(v, F: tl.constexpr, factor, EXACT_SIGNS: tl.constexpr, PTX: tl.constexpr):
    """Eight codes, int32 [T], of the values from v[F] on; factor as in `pack_bytes_ptx`."""
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
def _store_words(place, words, inside):
    tl.store(place[:, None] + tl.arange(0, words.shape[1])[None, :], words, mask=inside[:, None])


def hadamard(x: Tensor, dense: Tensor | None = None) -> Tensor:
    """Rotate whole rows: `rotation.hadamard_rows`, rounded once to x's dtype, ties to even.

    x: [N, K] bf16, fp16 or fp32 on a CUDA device (under TRITON_INTERPRET=1 on the CPU), any
    strides; rows whose values are neighbours are not copied. K = 2^k from 16, or m 2^k from 4 m
    with dense: int8 [m, m], entries +-1, on x's device; at most MAX_COLUMNS and MAX_DENSE.
    Returns [N, K] of the same dtype. Raises UnsupportedError for another K or m.
    """
    n, k = x.shape
    cut = tiling(k, dense)
    y = torch.empty(n, k, dtype=x.dtype, device=x.device)
    if n == 0:
        return y
    words, stride, kind = pairs(x)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _hadamard_kernel[_programs(n, cut),](
            words,
            _signs(dense, words),
            y.view(torch.int16) if kind == "bf16" else y,
            n,
            stride,
            NORMALIZER=rotation.normalizer(k),
            KIND=kind,
            **_launch(cut, _hadamard_kernel),
        )
    return y


def hadamard_amax(x: Tensor, dense: Tensor | None = None, up: Tensor | None = None) -> Tensor:
    """Largest magnitude of what `hadamard_quantize` encodes: fp32 [] on x's device, not waited for.

    x, dense, up: as there. NaN where a rotated value is NaN or Inf. Raises UnsupportedError as
    `hadamard` does.
    """
    n, k = x.shape
    cut = tiling(k, dense)
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    if n == 0:
        return bits.view(torch.float32)
    words, stride, kind = pairs(x)
    up_words, up_stride, _ = (words, stride, kind) if up is None else pairs(up)
    with torch.cuda.device_of(x):
        _amax_kernel[_programs(n, cut),](
            words,
            up_words,
            _signs(dense, words),
            bits,
            n,
            stride,
            up_stride,
            FACTOR=math.prod(_factors(k, kind, up is not None, in_ptx(_amax_kernel))),
            KIND=kind,
            GATED=up is not None,
            **_launch(cut, _amax_kernel),
        )
    return bits.view(torch.float32)


def hadamard_quantize(
    x: Tensor,
    multiplier: Tensor,
    dense: Tensor | None = None,
    up: Tensor | None = None,
    swizzled_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate whole rows and encode them to NVFP4 in one pass, bit for bit as the references do.

    x: as of `hadamard`, finite, K a multiple of 16. multiplier: fp32 [1] on x's device, the global
    scale of what is encoded (`hadamard_amax` / 2688); it is not waited for. up: like x; then x is
    the gate and the rows are `rotation.silu_mul(x, up)`.

    Returns the codes, uint8 [N, K/2], low nibble first, and the block scales, float8_e4m3fn [N,
    K/16] or, where `swizzled_scales`, of `swizzle.padded_shape` with zeros in the padding.
    Raises ValueError for a K that is no multiple of 16 and UnsupportedError as `hadamard` does.
    """
    n, k = check_blocks(x.shape)
    cut = tiling(k, dense)
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=x.device)
    shape = swizzle.padded_shape(n, k // BLOCK) if swizzled_scales else (n, k // BLOCK)
    # Rows of the padding are written by the kernel, columns, which only the smallest K have, not.
    allocate = torch.zeros if shape[1] > k // BLOCK else torch.empty
    scale_byte = allocate(shape, dtype=torch.uint8, device=x.device)
    if n == 0:
        return packed, scale_byte.view(torch.float8_e4m3fn)
    words, stride, kind = pairs(x)
    up_words, up_stride, _ = (words, stride, kind) if up is None else pairs(up)
    early, late = _factors(k, kind, up is not None, in_ptx(_quantize_kernel))
    with torch.cuda.device_of(x):
        _quantize_kernel[_programs(shape[0], cut),](
            words,
            up_words,
            _signs(dense, words),
            packed.view(torch.int32),
            scale_byte.view(_UNITS[min(cut.R // BLOCK, 4)]),
            multiplier,
            n,
            shape[0],
            stride,
            up_stride,
            EARLY=early,
            LATE=late,
            SWIZZLED=swizzled_scales,
            KIND=kind,
            GATED=up is not None,
            **_launch(cut, _quantize_kernel),
        )
    return packed, scale_byte.view(torch.float8_e4m3fn)


def _programs(rows: int, cut: Tiling) -> int:
    return triton.cdiv(rows * cut.ORDER * cut.SIZE, cut.R * cut.T)


def _launch(cut: Tiling, kernel: object) -> dict[str, object]:
    options = {"num_warps": max(1, cut.T // 32), "enable_fp_fusion": False}
    return {**cut._asdict(), "PTX": in_ptx(kernel), **options}


def _signs(dense: Tensor | None, unused: Tensor) -> Tensor:
    """The entries of a dense factor, four neighbours in a word: int32 [m, m/4]."""
    return unused if dense is None else dense.contiguous().view(torch.int32)


def _factors(k: int, kind: str, gated: bool, ptx: bool) -> tuple[float, float]:
    """What rotated values are multiplied by: first, and through the scales of their blocks.

    A power of two can wait for the scales, unless subnormals could lose by it.
    """
    normalizer = rotation.normalizer(k)
    if gated and ptx:
        return normalizer / GATED_FACTOR.value, 1.0
    if ptx and kind != "fp32" and math.frexp(normalizer)[0] == 0.5:
        return 1.0, normalizer
    return normalizer, 1.0
