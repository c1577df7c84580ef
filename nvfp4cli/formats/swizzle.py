"""The 128 x 4 tile order that Blackwell's block-scaled matrix units read block scales in.

cuBLASLt, "1D block scaling factors layout"; vLLM `swizzle_blockscale`, torchao `to_blocked`.
Scale (m, k) of a [M, Kb] matrix lies at byte

    ((m // 128) * ceil(Kb / 4) + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
"""

import torch
from torch import Tensor

ROWS = 128
COLUMNS = 4


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the zero-padded scale matrix: rows to a multiple of 128, columns to one of 4."""
    return -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """[M, Kb] scales (one byte each) -> the same dtype, [128 * ceil(M/128), 4 * ceil(Kb/4)].

    Only the order of the bytes has meaning; consumers differ in the shape they give it.
    """
    m, kb = scales.shape
    rows, columns = padded_shape(m, kb)
    padded = torch.zeros(rows, columns, dtype=torch.uint8, device=scales.device)
    padded[:m, :kb] = scales.view(torch.uint8)
    tiles = padded.view(rows // ROWS, 4, 32, columns // COLUMNS, COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `swizzle`: any shape holding the swizzled bytes -> [rows, columns] scales."""
    m, kb = padded_shape(rows, columns)
    tiles = swizzled.view(torch.uint8).reshape(m // ROWS, kb // COLUMNS, 32, 4, COLUMNS)
    linear = tiles.permute(0, 3, 2, 1, 4).reshape(m, kb)[:rows, :columns]
    return linear.contiguous().view(swizzled.dtype)
