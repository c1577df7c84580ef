"""How kernels deal a matrix out to programs, and what each of them does with its tile."""

from typing import NamedTuple

import triton
import triton.language as tl

from nvfp4cli.kernels.numbers_triton import split_four

_MAX_COLUMNS = 64  # of a tile: blocks of 16 from one row, 2 KB of bf16
_MAX_AXIS = 65535  # programs along the second and the third axis of a grid

# The largest of sixteen magnitudes. Of what is cut out of words LLVM would take each sign bit off
# with an instruction of its own.
_AMAX = tl.constexpr(
    "{ .reg .f32 a, b; abs.f32 a, $1; "
    + " ".join(f"abs.f32 b, ${i}; max.f32 a, a, b;" for i in range(2, 17))
    + " mov.f32 $0, a; }"
)


class Tiles(NamedTuple):
    """A matrix of items cut into tiles of ROWS x COLUMNS. even: they cover it exactly."""

    columns: int
    rows: int
    even: bool
    grid: tuple[int, int, int]


def tiles(n: int, columns: int, size: int) -> Tiles:
    """Tiles of `size` items for a matrix of n rows of `columns` items. size: a power of two."""
    across = min(_MAX_COLUMNS, size, triton.next_power_of_2(columns))
    down = size // across
    programs = triton.cdiv(n, down)
    # Two axes for the rows: one might be too short, and a program's division to find its row in one
    # long axis would delay its first load, 8 % of the time of a whole kernel.
    grid = triton.cdiv(columns, across), min(programs, _MAX_AXIS), triton.cdiv(programs, _MAX_AXIS)
    even = n % down == 0 and columns % across == 0 and grid[1] * grid[2] == programs
    return Tiles(across, down, even, grid)


@triton.jit
def tile(n, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Which of [n, columns] items are this program's: row as int64, column, whether there is one.

    Programs that run side by side go along the rows. Rows are int64: a tensor of more than 2^31
    values overflows int32 offsets.
    """
    index = tl.arange(0, ROWS * COLUMNS)
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    row = program.to(tl.int64) * ROWS + index // COLUMNS
    column = tl.program_id(0) * COLUMNS + index % COLUMNS
    return row, column, (row < n) & (column < columns)


@triton.jit
def run(total, SIZE: tl.constexpr):
    """Which of `total` items are this program's: int64 [SIZE], and whether there is one."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    return place, place < total


@triton.jit
def swizzled(row, column, columns):
    """Where `swizzle.swizzle` puts the scale of (row, column); columns: unpadded, of the matrix."""
    tiles_per_row = (columns + 3) // 4
    low = row.to(tl.int32) % 128
    within = low % 32 * 16 + low // 32 * 4 + column % 4
    return (row // 128 * tiles_per_row + column // 4) * 512 + within


@triton.jit
def block_amax(a, b, c, d, PTX: tl.constexpr):
    """[T], of four [T, 4]."""
    if PTX:
        e0, e1, e2, e3 = split_four(a)
        o0, o1, o2, o3 = split_four(b)
        f0, f1, f2, f3 = split_four(c)
        p0, p1, p2, p3 = split_four(d)
        return tl.inline_asm_elementwise(
            _AMAX,
            "=r" + ",r" * 16,
            [e0, e1, e2, e3, o0, o1, o2, o3, f0, f1, f2, f3, p0, p1, p2, p3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        amax = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        return tl.max(amax, axis=1)


@triton.jit
def store_words(place, values, inside, EVEN: tl.constexpr):
    """Store [T, S] at pointers [T] and the S - 1 behind them. EVEN: all are inside."""
    places = place[:, None] + tl.arange(0, values.shape[1])[None, :]
    if EVEN:
        tl.store(places, values)
    else:
        tl.store(places, values, mask=inside[:, None])


@triton.jit
def store_one(place, values, inside, EVEN: tl.constexpr):
    """Store [T] at pointers [T]."""
    if EVEN:
        tl.store(place, values)
    else:
        tl.store(place, values, mask=inside)


@triton.jit
def store_swizzled(
    scale_ptr, byte, n, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    """Store the bytes [T] of a `tile` where `swizzle.swizzle` puts them: four columns at a time.

    n, columns: of the matrix, unpadded. COLUMNS: at least four. What the program alone decides is
    computed once, and only that in int64.
    """
    quad = tl.arange(0, ROWS * COLUMNS // 4)
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    first = program.to(tl.int64) * ROWS
    per_row = (columns + 3) // 4
    column = tl.program_id(0) * (COLUMNS // 4) + quad % (COLUMNS // 4)  # in fours
    row = (first & 127).to(tl.int32) + quad // (COLUMNS // 4)  # from the start of a tile of 128
    inside = (first // 128 * 128 + row < (n + 127) // 128 * 128) & (column < per_row)
    base = (first // 128 * per_row + tl.program_id(0) * (COLUMNS // 4)) * 512
    within = (row & 31) * 16 + (row >> 5 & 3) * 4 + quad % (COLUMNS // 4) * 512
    if ROWS > 32:
        within += (row >> 7) * (per_row * 512)
    fours = tl.reshape(byte, (ROWS * COLUMNS // 4, 4))
    store_words(scale_ptr + (base + within), fours, inside, EVEN)
