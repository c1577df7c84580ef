"""Whole rows through a Walsh-Hadamard transform in the registers of one program.

A program holds rows as fp32 [R, T]: R values in each of T threads. Butterflies between values of
one thread exchange nothing, so the index bits are taken in groups, from the top: the bits of a
group are brought into the registers, its stages are done, and the tensor is transposed for the
next. Bit 0 stays in the registers throughout, so that pairs move together. In the last group a
thread holds R neighbours, whole blocks of 16, which is what the encoder needs. The 13 bits of 8192
values are 4, 4 and 5 of 32 registers: two transpositions.

The order of operations is that of `formats.rotation.hadamard_rows`, and so are the bits. A dense
factor is applied four of its columns at a time, so that a program holds four runs of 2^k values.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.kernels.load_triton import silu_mul, widen

MAX_COLUMNS = 32768  # 128 KiB of shared memory in fp32
MAX_DENSE = 256  # a dense factor of order m costs m additions a value
REGISTERS = (16, 32, 64, 128)  # values a thread may hold; any of them gives the same bits
THREADS = 64  # at least

_FEWEST = 32  # registers, unless a row has not as many values
_MAX_GROUPS = 3

_PARTS = 4  # columns of the dense factor that a program applies; it divides every order above 2


class Tiling(NamedTuple):
    """How a kernel is cut; compile-time parameters of every kernel here.

    SIZE: butterflies span SIZE = 2^k values. ORDER: of the dense factor, 1 without. R, T: values
    of a thread, threads. LOWS: the lowest index bit of each group but bit 0, which is in all.
    """

    SIZE: int
    ORDER: int
    R: int
    T: int
    LOWS: tuple[int, ...]


def tiling(k: int, dense: Tensor | None) -> Tiling:
    """Cut rows of `k` values: 32 registers, or more where they would take over two transpositions.

    With few registers many programs run side by side: to encode 8192 x 8192 bf16 takes 78 us on an
    H200 with 32 registers and two transpositions, 97 with 128 and one, at least 82 with 64 and two.

    Raises UnsupportedError for a size or a dense order that the kernels do not handle.
    """
    order = 1 if dense is None else len(dense)
    size = k // order
    if size * order != k or size & (size - 1) or size < (16 if dense is None else 4):
        raise UnsupportedError(
            f"Rows of {k} values are not {order} x 2^k with 2^k at least "
            f"{16 if dense is None else 4}: use a block Hadamard of 16 to 128 instead."
        )
    if k > MAX_COLUMNS or order > MAX_DENSE or (order > 1 and order % _PARTS):
        raise UnsupportedError(
            f"Rows of {k} values with a dense factor of order {order} exceed {MAX_COLUMNS} "
            f"values or an order of {MAX_DENSE} in steps of {_PARTS}: use a block Hadamard of "
            "16 to 128 instead."
        )
    span = size if dense is None else size * _PARTS
    lows = {r: _lows(span, r) for r in REGISTERS if r <= span}
    r = min(lows, key=lambda r: (len(lows[r]) > _MAX_GROUPS, r < _FEWEST, r))
    return Tiling(size, order, r, max(THREADS, span // r), lows[r])


def _lows(span: int, r: int) -> tuple[int, ...]:
    """The lowest bit of each group, apart from bit 0, from the top bit of `span` down."""
    step = r.bit_length() - 2  # bits of r, without bit 0
    lows = [max(1, span.bit_length() - 1 - step)]
    while lows[-1] > 1:
        lows.append(max(1, lows[-1] - step))
    return tuple(lows)


@triton.jit
def load_words(
    x_ptr,
    tile,
    n,
    x_stride,
    SIZE: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    LOWS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The words of a tile without a dense factor, [R/2, T], for `rotated_words`.

    They can be loaded while another tile is at work.
    """
    row, _, first = _first(tile, SIZE, 1, R, T, LOWS)
    place = x_ptr + (row.to(tl.int64) * x_stride + first)
    return _words(place, row < n, R // 2, LOWS, EVEN)


@triton.jit
def rotated_words(
    words,
    SIZE: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    LOWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """`rotated_rows` of words that are there already."""
    even, odd = widen(words, KIND)
    x = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (R, T))
    return _butterflies(x, SIZE, LOWS)


@triton.jit
def rotated_rows(
    x_ptr,
    up_ptr,
    signs_ptr,
    tile,
    n,
    x_stride,
    up_stride,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    LOWS: tl.constexpr,
    EVEN: tl.constexpr,  # the tile holds no rows outside
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PTX: tl.constexpr,
):
    """The values of a tile, fp32 [R, T], not normalised: thread t holds the R from t * R on.

    Rows outside are zeros.
    """
    row, part, first = _first(tile, SIZE, ORDER, R, T, LOWS)
    inside = row < n
    x_row = x_ptr + (row.to(tl.int64) * x_stride + first)
    up_row = up_ptr + (row.to(tl.int64) * up_stride + first)
    if ORDER == 1:
        even, odd = _values(x_row, up_row, inside, R // 2, LOWS, EVEN, KIND, GATED, PTX)
        x = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (R, T))
    else:
        # Not +0: the sum of -0 and -0 has to stay -0.
        even = tl.full((4, R // 8, T), -0.0, tl.float32)
        odd = tl.full((4, R // 8, T), -0.0, tl.float32)
        for i in range(ORDER):
            a, b = _values(x_row, up_row, inside, R // 8, LOWS, EVEN, KIND, GATED, PTX)
            word = tl.load(signs_ptr + (i * (ORDER // 4) + part // 4))[None, :]  # four of +-1
            bits = (word << (24 - 8 * tl.arange(0, 4))[:, None]) & -0x80000000 | 0x3F800000
            sign = bits.to(tl.int32).to(tl.float32, bitcast=True)[:, None, :]  # [4, 1, T]
            even = tl.fma(tl.broadcast_to(a[None, :, :], even.shape), sign, even)
            odd = tl.fma(tl.broadcast_to(b[None, :, :], odd.shape), sign, odd)
            x_row += SIZE // 2
            up_row += SIZE // 2
        x = tl.reshape(tl.permute(tl.join(even, odd), (0, 1, 3, 2)), (R, T))
    return _butterflies(x, SIZE, LOWS)


@triton.jit
def _first(
    tile,
    SIZE: tl.constexpr,
    ORDER: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    LOWS: tl.constexpr,
):
    """Row, column of the dense factor and pair there of the first value that each thread loads.

    In the first group pairs of a thread are L apart.
    """
    L: tl.constexpr = 2 ** (LOWS[0] - 1)
    t = tl.arange(0, T)
    first = t // L * (L * R) + t % L * 2
    row, part = _place(tile, first, SIZE, ORDER, R, T)
    return row, part, first % SIZE // 2


@triton.jit
def run_start(tile, SIZE: tl.constexpr, ORDER: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    """Row and column, int32 [T], of the first of the R neighbours that each thread ends with."""
    element = tl.arange(0, T) * R
    row, part = _place(tile, element, SIZE, ORDER, R, T)
    return row, part * SIZE + element % SIZE


@triton.jit
def _place(
    tile, element, SIZE: tl.constexpr, ORDER: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    """Row and column of the dense factor, int32, of values of a tile."""
    span = tile * (R * T // SIZE) + element // SIZE
    return span // ORDER, span % ORDER


@triton.jit
def _values(
    x_row,
    up_row,
    inside,
    W: tl.constexpr,
    LOWS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Even and odd elements, fp32 [W, T], of W pairs from the places of threads [T] on."""
    even, odd = widen(_words(x_row, inside, W, LOWS, EVEN), KIND)
    if GATED:
        even_up, odd_up = widen(_words(up_row, inside, W, LOWS, EVEN), KIND)
        even, odd = silu_mul(even, even_up, PTX), silu_mul(odd, odd_up, PTX)
    return even, odd


@triton.jit
def _words(first, inside, W: tl.constexpr, LOWS: tl.constexpr, EVEN: tl.constexpr):
    L: tl.constexpr = 2 ** (LOWS[0] - 1)
    places = first[None, :] + (tl.arange(0, W) * L)[:, None]
    # What is said of L threads side by side is true and keeps the compiler from dealing the words
    # out anew. What is said of alignment is less than it may know: a load of four words would bring
    # a thread neighbours, which are to lie in other threads.
    places = tl.multiple_of(tl.max_contiguous(places, (1, min(L, 4))), (1, 4))
    if EVEN:
        return tl.load(places)
    else:
        return tl.load(places, mask=inside[None, :], other=0)


@triton.jit
def _butterflies(x, SIZE: tl.constexpr, LOWS: tl.constexpr):
    """`rotation.butterflies` over SIZE neighbours; from the first group's [R, T] to the last's."""
    TOP: tl.constexpr = SIZE.bit_length() - 1
    for bit in tl.static_range(TOP - 1, LOWS[0] - 1, -1):
        x = _stage(x, 2 ** (bit - LOWS[0] + 1))
    for group in tl.static_range(1, len(LOWS)):
        x = _regroup(x, 2 ** (LOWS[group - 1] - 1), 2 ** (LOWS[group] - 1))
        for bit in tl.static_range(LOWS[group - 1] - 1, LOWS[group] - 1, -1):
            x = _stage(x, 2 ** (bit - LOWS[group] + 1))
    return _stage(x, 1)


@triton.jit
def _stage(x, DISTANCE: tl.constexpr):
    """Butterflies between registers that are DISTANCE apart; x: [R, T]."""
    R: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[1]
    parts = tl.reshape(x, (R // (2 * DISTANCE), 2, DISTANCE, T))
    a, b = tl.split(tl.permute(parts, (0, 2, 3, 1)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), (R, T))


@triton.jit
def _regroup(x, OLD: tl.constexpr, NEW: tl.constexpr):
    """Transpose from a group whose pairs are OLD pairs apart to one where it is NEW; [R, T]."""
    W: tl.constexpr = x.shape[0] // 2
    T: tl.constexpr = x.shape[1]
    ordered = tl.permute(tl.reshape(x, (W, 2, T // OLD, OLD)), (2, 0, 3, 1))
    grouped = tl.permute(tl.reshape(ordered, (T // NEW, W, NEW, 2)), (1, 3, 0, 2))
    return tl.reshape(grouped, (2 * W, T))


@triton.jit
def registers(x, R: tl.constexpr, T: tl.constexpr):
    """[R, T] -> R tensors [T]. What is 1-D has one layout: no pass can find a reason to move it."""
    parts = (tl.reshape(x, (R * T,)),)
    for level in tl.static_range(R.bit_length() - 1):
        halves = _halves(parts[0])
        for i in tl.static_range(1, 2**level):
            halves += _halves(parts[i])
        parts = halves
    return parts


@triton.jit
def _halves(x):
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2)), (1, 0)))
