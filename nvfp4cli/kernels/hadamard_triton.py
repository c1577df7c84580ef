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
from nvfp4cli.kernels.numbers_triton import in_ptx
from nvfp4cli.kernels.row_codes_triton import encode_rows
from nvfp4cli.kernels.rows_triton import (
    Tiling,
    load_words,
    rotated_rows,
    rotated_words,
    run_start,
    tiling,
)

# Integers of the width that holds as many scale bytes as a thread joins.
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# In a launch whose programs encode several tiles each: three times what runs on an H200's 132
# multiprocessors side by side, 24 warps each, since programs of one wave do not end together.
WARPS = 9504
# Where threads hold at most _FEW values and are at most _MANY: registers of a thread, with those
# for the words of another row or of gate and factor. Left alone, the compiler takes so many that a
# program fewer fits.
_FEW = 32
_MANY = 512
_AHEAD_REGISTERS = 80
_GATED_REGISTERS = 64

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
    EVEN: tl.constexpr,
):
    tile = tl.program_id(0)
    x = rotated_rows(
        x_ptr, x_ptr, signs_ptr, tile, n, x_stride, x_stride,
        SIZE, ORDER, R, T, LOWS, EVEN, KIND, False, PTX,
    )  # fmt: skip
    x *= NORMALIZER
    if KIND != "bf16":
        y = x.to(y_ptr.dtype.element_ty)
    elif PTX:
        y = x.to(tl.bfloat16).to(tl.int16, bitcast=True)  # one instruction for two
    else:
        # With integers: the interpreter's cast truncates. NaN would round to Inf or 0.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where((bits & 0x7FFFFFFF) > _INFINITY, 0x7FC0, rounded).to(tl.int16)
    row, column = run_start(tile, SIZE, ORDER, R, T)
    places = (y_ptr + (row.to(tl.int64) * (SIZE * ORDER) + column))[None, :]
    places += tl.arange(0, R)[:, None]
    if EVEN:
        tl.store(places, y)
    else:
        tl.store(places, y, mask=(row < n)[None, :])


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
    EVEN: tl.constexpr,
):
    x = rotated_rows(
        x_ptr, up_ptr, signs_ptr, tl.program_id(0), n, x_stride, up_stride,
        SIZE, ORDER, R, T, LOWS, EVEN, KIND, GATED, PTX,
    )  # fmt: skip
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
    tiles,
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
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A launch covers the padded rows, where the maximum of a block is 0 and so its byte.

    With AHEAD, which is for plain rows of bf16 or fp16, a program encodes every num_programs-th
    tile and loads the next meanwhile; else its own alone.
    """
    multiplier = tl.load(multiplier_ptr)
    if AHEAD:
        words = load_words(x_ptr, tl.program_id(0), n, x_stride, SIZE, R, T, LOWS, EVEN)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            now = words
            # Behind the last it loads that again: a mask would cost more.
            following = tl.minimum(tile + tl.num_programs(0), tiles - 1)
            words = load_words(x_ptr, following, n, x_stride, SIZE, R, T, LOWS, EVEN)
            x = rotated_words(now, SIZE, R, T, LOWS, KIND)
            encode_rows(
                x, multiplier, tile, packed_ptr, scale_ptr, n, padded_rows, EARLY, LATE,
                SIZE, ORDER, R, T, SWIZZLED, EVEN, False, PTX,
            )  # fmt: skip
    else:
        tile = tl.program_id(0)
        x = rotated_rows(
            x_ptr, up_ptr, signs_ptr, tile, n, x_stride, up_stride,
            SIZE, ORDER, R, T, LOWS, EVEN, KIND, GATED, PTX,
        )  # fmt: skip
        encode_rows(
            x, multiplier, tile, packed_ptr, scale_ptr, n, padded_rows, EARLY, LATE,
            SIZE, ORDER, R, T, SWIZZLED, EVEN, KIND == "fp32" and not GATED, PTX,
        )  # fmt: skip


def hadamard(x: Tensor, dense: Tensor | None = None) -> Tensor:
    """Rotate whole rows: `rotation.hadamard_rows`, rounded once to x's dtype, ties to even.

    x: [N, K] bf16, fp16 or fp32 on a CUDA device (under TRITON_INTERPRET=1 on the CPU), any
    strides; rows whose values are neighbours are not copied. K = 2^k from 16, or m 2^k from 4 m
    with dense: int8 [m, m], entries +-1, on x's device; at most MAX_COLUMNS and MAX_DENSE.
    Returns [N, K] of the same dtype; the bits of a NaN are the device's. Raises UnsupportedError
    for another K or m.
    """
    n, k = x.shape
    cut = tiling(k, dense)
    y = torch.empty(n, k, dtype=x.dtype, device=x.device)
    if n == 0:
        return y
    words, stride, kind = pairs(x)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _hadamard_kernel[(_tiles(n, cut),)](
            words,
            _signs(dense, words),
            y.view(torch.int16) if kind == "bf16" else y,
            n,
            stride,
            NORMALIZER=rotation.normalizer(k),
            KIND=kind,
            **_options(cut, n, n, _hadamard_kernel),
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
        _amax_kernel[(_tiles(n, cut),)](
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
            **_options(cut, n, n, _amax_kernel),
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
    programs, options = _encoding(cut, n, shape[0], kind, up is not None)
    with torch.cuda.device_of(x):
        _quantize_kernel[(programs,)](
            words,
            up_words,
            _signs(dense, words),
            packed.view(torch.int32),
            scale_byte.view(_UNITS[min(cut.R // BLOCK, 4)]),
            multiplier,
            n,
            shape[0],
            _tiles(shape[0], cut),
            stride,
            up_stride,
            EARLY=early,
            LATE=late,
            SWIZZLED=swizzled_scales,
            KIND=kind,
            GATED=up is not None,
            **options,
        )
    return packed, scale_byte.view(torch.float8_e4m3fn)


def _tiles(rows: int, cut: Tiling) -> int:
    return triton.cdiv(rows * cut.ORDER * cut.SIZE, cut.R * cut.T)


def _options(cut: Tiling, n: int, rows: int, kernel: object) -> dict[str, object]:
    """Of a launch over `rows` rows, n of which there are."""
    return {
        **cut._asdict(),
        "EVEN": n == rows and n * cut.ORDER * cut.SIZE % (cut.R * cut.T) == 0,
        "PTX": in_ptx(kernel),
        "num_warps": max(1, cut.T // 32),
        "enable_fp_fusion": False,
    }


def _encoding(
    cut: Tiling, n: int, rows: int, kind: str, gated: bool
) -> tuple[int, dict[str, object]]:
    """Programs and options of a launch that encodes: see `_options`."""
    few = kind != "fp32" and cut.R <= _FEW and cut.T <= _MANY
    ahead = few and cut.ORDER == 1 and not gated
    programs = _tiles(rows, cut)
    options = {**_options(cut, n, rows, _quantize_kernel), "AHEAD": ahead}
    if ahead:
        options["maxnreg"] = _AHEAD_REGISTERS
        programs = min(programs, triton.cdiv(WARPS * 32, max(cut.T, 32)))
    elif few and gated:
        options["maxnreg"] = _GATED_REGISTERS
    return programs, options


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
