"""How kernels deal a matrix out to programs, and what each of them does with its tile."""

from typing import NamedTuple

import triton
import triton.language as tl

_MAX_COLUMNS = 64  # of a tile: blocks of 16 from one row, 2 KB of bf16
_MAX_AXIS = 65535  # programs along the second and the third axis of a grid


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
def block_amax(a, b, c, d):
    """[T], of four [T, 4]."""
    amax = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.max(amax, axis=1)


@triton.jit
def store_four(place, values, inside, EVEN: tl.constexpr):
    """Store [T, 4] at pointers [T] and the three behind them. EVEN: all are inside."""
    places = place[:, None] + tl.arange(0, 4)[None, :]
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
