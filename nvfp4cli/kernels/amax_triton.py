"""The largest magnitude of a matrix in Triton, rotated or gated first if asked, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats.nvfp4 import BLOCK, check_blocks
from nvfp4cli.kernels.load_triton import factors, load_block, pairs
from nvfp4cli.kernels.numbers_triton import in_ptx

TILE = 256  # blocks that a program holds at once
_PROGRAMS = 4096  # enough to fill any GPU, few enough for their atomic operations to be cheap


@triton.jit
def _amax_kernel(
    x_ptr,  # pairs [N, K/2]
    up_ptr,  # pairs [N, K/2], read if GATED
    amax_ptr,  # int32 [1], bits of an fp32 value, 0 at the start
    signs_ptr,  # fp32 [HADAMARD], read if SIGNED
    n,
    blocks_per_row,
    row_stride,  # in pairs
    up_stride,
    tiles,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    EVEN: tl.constexpr,  # tiles cover the matrix exactly
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SIGNED: tl.constexpr,
    HADAMARD: tl.constexpr,
    EARLY: tl.constexpr,  # factors of the rotated values and of their maximum
    LATE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Programs share the tiles of ROWS x COLUMNS blocks.

    The bits of magnitudes are in the order of their values, with NaN above Inf above all others: an
    integer maximum keeps both, and comes out the same in whatever order programs reach it.
    """
    index = tl.arange(0, ROWS * COLUMNS)
    tiles_per_row = tl.cdiv(blocks_per_row, COLUMNS)
    largest = tl.zeros((ROWS * COLUMNS, 4), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // tiles_per_row * ROWS + index // COLUMNS
        column = tile % tiles_per_row * COLUMNS + index % COLUMNS
        inside = (row < n) & (column < blocks_per_row)
        wide = row.to(tl.int64)
        x_place = x_ptr + (wide * row_stride + column * 8)
        up_place = up_ptr + (wide * up_stride + column * 8)
        a, b, c, d = load_block(
            x_place, up_place, signs_ptr, column, inside, EVEN, KIND, GATED, SIGNED, HADAMARD, PTX
        )
        if EARLY != 1:
            a, b, c, d = a * EARLY, b * EARLY, c * EARLY, d * EARLY
        largest = tl.maximum(largest, tl.maximum(_bits(a), _bits(b)))
        largest = tl.maximum(largest, tl.maximum(_bits(c), _bits(d)))
    amax = tl.max(tl.max(largest, axis=1), axis=0).to(tl.float32, bitcast=True) * LATE
    tl.atomic_max(amax_ptr, amax.to(tl.int32, bitcast=True))


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


def amax_triton(
    x: Tensor, *, up: Tensor | None = None, hadamard: int = 1, signs: Tensor | None = None
) -> Tensor:
    """`kernels.fused_amax` on a CUDA device (under TRITON_INTERPRET=1 on the CPU)."""
    n, k = check_blocks(x.shape)
    kb = k // BLOCK
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return bits.view(torch.float32)
    words, row_stride, kind = pairs(x)
    up_words, up_stride, _ = (words, row_stride, kind) if up is None else pairs(up)
    columns = min(TILE, triton.next_power_of_2(kb))
    rows = TILE // columns
    tiles = triton.cdiv(n, rows) * triton.cdiv(kb, columns)
    ptx = in_ptx(_amax_kernel)
    early, late = factors(hadamard, kind, up is not None, ptx)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _amax_kernel[min(tiles, _PROGRAMS),](
            words,
            up_words,
            bits,
            bits if signs is None else signs.to(torch.float32),
            n,
            kb,
            row_stride,
            up_stride,
            tiles,
            COLUMNS=columns,
            ROWS=rows,
            EVEN=n % rows == 0 and kb % columns == 0,
            KIND=kind,
            GATED=up is not None,
            SIGNED=signs is not None,
            HADAMARD=hadamard,
            EARLY=early,
            LATE=late,
            PTX=ptx,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return bits.view(torch.float32)
