"""How a thread comes to hold one block of 16, ready to be encoded: load, SiLU, rotate.

The block is four fp32 tensors [T, 4]: the even and the odd elements of its first and of its second
half. Two neighbours of 16 bits are loaded as one 32-bit word, two of 32 bits as one of 64.
"""

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats import rotation
from nvfp4cli.kernels.numbers_triton import MAGIC, reciprocal_ptx

KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# What gated blocks are multiplied by in PTX: 2^-100 becomes 2^-126.
GATED_FACTOR = tl.constexpr(2.0**-26)

_SMALLEST_GATED = tl.constexpr(rotation.SMALLEST_GATED)
_SHARE = tl.constexpr(rotation.SHARE)
_OCTAVES = tl.constexpr(rotation.OCTAVES)
_STEP = tl.constexpr(rotation.STEP)
_CENTER = tl.constexpr(rotation.CENTER)
_SLOPE = tl.constexpr(rotation.SLOPE)
_LINEAR = tl.constexpr(rotation.LINEAR)
_CONSTANT = tl.constexpr(rotation.CONSTANT)
_LOWEST = tl.constexpr(rotation.LOWEST)
_SHARE_PTX = tl.constexpr(
    f"fma.rn.sat.f32 $0, $1, 0fBC000000, 0f{struct.pack('>f', rotation.SHARE).hex()};"  # -1/128
)
# Octaves are counted from here in PTX, so that the eight low bits are the exponent of the power.
_FIRST = tl.constexpr(MAGIC.value + 127 + 26 + rotation.LOWEST)  # 26: 1 / GATED_FACTOR


class Pairs(NamedTuple):
    """A matrix [N, K] seen as words of two values. words: [N, K/2] int32 or int64."""

    words: Tensor
    row_stride: int
    kind: str


def pairs(x: Tensor) -> Pairs:
    """View a matrix [N, K] of bf16, fp16 or fp32, K even, as words; copied where it cannot be."""
    aligned = x.stride(1) == 1 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    if not aligned:
        x = x.contiguous()
    words = x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)
    return Pairs(words, words.stride(0), KINDS[x.dtype])


def factors(hadamard: int, kind: str, gated: bool, ptx: bool) -> tuple[float, float]:
    """What the values of `load_block` are still to be multiplied by: first and through the scales.

    The second is a power of two and can wait unless subnormals could lose by it.
    """
    normalizer = rotation.normalizer(hadamard)
    left = 1 / GATED_FACTOR.value if ptx and gated else 1.0
    if hadamard in (1, 16, 64) and ptx and (kind != "fp32" or gated):
        return 1.0, normalizer * left
    return normalizer * left, 1.0


@triton.jit
def load_block(
    x_place,  # pointers [T] to the first pair of each block
    up_place,
    signs_ptr,
    column,  # [T], of the block in its row
    inside,  # bool [T]; a block outside is zeros
    EVEN: tl.constexpr,  # all are inside: masks would cost 5 %
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SIGNED: tl.constexpr,
    HADAMARD: tl.constexpr,
    PTX: tl.constexpr,
):
    """Even and odd elements of both halves, rotated but not divided by the root of HADAMARD.

    With GATED and PTX they are multiplied by GATED_FACTOR.
    """
    a, b = _half(x_place, inside, KIND, EVEN)
    c, d = _half(x_place + 4, inside, KIND, EVEN)
    if GATED:
        e, f = _half(up_place, inside, KIND, EVEN)
        g, h = _half(up_place + 4, inside, KIND, EVEN)
        a, b = silu_mul(a, e, PTX), silu_mul(b, f, PTX)
        c, d = silu_mul(c, g, PTX), silu_mul(d, h, PTX)
    if SIGNED:
        element = (column % (HADAMARD // 16) * 16)[:, None] + tl.arange(0, 4)[None, :] * 2
        a, b = a * tl.load(signs_ptr + element), b * tl.load(signs_ptr + element + 1)
        c, d = c * tl.load(signs_ptr + element + 8), d * tl.load(signs_ptr + element + 9)
    if HADAMARD >= 128:
        a, b, c, d = _across(a, 4, PTX), _across(b, 4, PTX), _across(c, 4, PTX), _across(d, 4, PTX)
    if HADAMARD >= 64:
        a, b, c, d = _across(a, 2, PTX), _across(b, 2, PTX), _across(c, 2, PTX), _across(d, 2, PTX)
    if HADAMARD >= 32:
        a, b, c, d = _across(a, 1, PTX), _across(b, 1, PTX), _across(c, 1, PTX), _across(d, 1, PTX)
    if HADAMARD >= 16:
        a, c = a + c, a - c
        b, d = b + d, b - d
        a, b, c, d = _four(a), _four(b), _four(c), _four(d)
        a, b = a + b, a - b
        c, d = c + d, c - d
    return a, b, c, d


@triton.jit
def _half(place, inside, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Even and odd elements of four pairs: fp32 [T, 4] each."""
    # Every value is read once: it must not drive others out of the cache. 4 % faster.
    places = place[:, None] + tl.arange(0, 4)[None, :]
    if EVEN:
        words = tl.load(places, eviction_policy="evict_first")
    else:
        words = tl.load(places, mask=inside[:, None], other=0, eviction_policy="evict_first")
    return widen(words, KIND)


@triton.jit
def widen(words, KIND: tl.constexpr):
    """Words of two values -> the even and the odd ones as fp32, exactly."""
    if KIND == "bf16":
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & -65536).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        even = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        odd = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        even = words.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def silu_mul(gate, up, PTX: tl.constexpr):
    """`rotation.silu_mul` of fp32 values; in PTX times GATED_FACTOR.

    That makes the smallest products fp32's smallest normal number, where flushing costs nothing.
    """
    if PTX:
        share = _share(gate)
        octave = tl.fma(share, _OCTAVES, _FIRST)
        y = tl.fma(share, _SLOPE, tl.fma(octave, -_STEP, _FIRST * _STEP + _CENTER))
        power = tl.fma(tl.fma(y, y, _LINEAR), y, _CONSTANT)
        scale = (octave.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
        # The product is exact: the sum is rounded as that of the power and 1.
        sigmoid = reciprocal_ptx(tl.fma(power, scale, 1 / GATED_FACTOR))
        return _flushed_product(_flushed_product(gate, sigmoid), up)
    else:
        gate = _flush(gate, 2.0**-126)
        share = tl.minimum(tl.maximum(_SHARE - gate * 2.0**-7, 0.0), 1.0)
        octave = _fma(share, _OCTAVES, MAGIC) - MAGIC
        y = _fma(share, _SLOPE, _CENTER - octave * _STEP)
        power = _fma(_fma(y, y, _LINEAR), y, _CONSTANT).to(tl.int32, bitcast=True)
        power = (power + ((octave.to(tl.int32) + _LOWEST) << 23)).to(tl.float32, bitcast=True)
        silu = _flush(gate * tl.div_rn(1.0, power + 1.0), _SMALLEST_GATED)
        return _flush(silu * _flush(up, 2.0**-126), _SMALLEST_GATED)


@triton.jit
def _fma(a, b, c):
    """`rotation._fma`: the interpreter does not fuse `tl.fma` in every version."""
    return (a.to(tl.float64) * b + c).to(tl.float32)


@triton.jit
def _flush(x, smallest):
    return tl.where(tl.abs(x) < smallest, 0.0, x)


@triton.jit
def _share(gate):
    """SHARE - gate / 128, limited to [0, 1]; that product is exact."""
    return tl.inline_asm_elementwise(
        _SHARE_PTX, "=r,r", [gate], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _flushed_product(x, y):
    """x * y, where subnormal factors and products are zeros."""
    return tl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _across(x, DISTANCE: tl.constexpr, PTX: tl.constexpr):
    """Butterflies between blocks that are DISTANCE apart; x: [T, 4].

    Compiled, the exclusive or of both partners, and once more with one's own bits, is the other: a
    shuffle for each value and no shared memory, which splitting an axis across threads would take.
    In the interpreter a reduction takes a hundred times as long as a split.
    """
    groups: tl.constexpr = x.shape[0] // (2 * DISTANCE)
    own = tl.reshape(x, (groups, 2, DISTANCE, 4))
    if PTX:
        bits = own.to(tl.int32, bitcast=True)
        other = (tl.expand_dims(tl.xor_sum(bits, axis=1), 1) ^ bits).to(tl.float32, bitcast=True)
        sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, :, None, None]
        answer = tl.fma(own, sign, other)
    else:
        first, second = tl.split(tl.permute(own, (0, 2, 3, 1)))  # [groups, DISTANCE, 4]
        answer = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(answer, x.shape)


@triton.jit
def _four(x):
    """Butterflies along the last axis, the wider first; x: [T, 4], in one thread."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    s0, d0 = e0 + e2, e0 - e2
    s1, d1 = e1 + e3, e1 - e3
    joined = tl.join(tl.join(s0 + s1, d0 + d1), tl.join(s0 - s1, d0 - d1))
    return tl.reshape(joined, x.shape)
