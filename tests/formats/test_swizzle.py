"""The tile order of block scales against the formula, byte by byte."""

import pytest
import torch
from torch import Tensor

from nvfp4cli.formats import swizzle

SHAPES = [(1, 1), (32, 4), (128, 4), (129, 5), (80, 13), (208, 5), (300, 9), (576, 36)]


def numbered(rows: int, columns: int) -> Tensor:
    """Bytes that repeat with the prime period 251 and are never 0, the padding."""
    return (torch.arange(rows * columns) % 251 + 1).to(torch.uint8).view(rows, columns)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_scale_lies_where_the_formula_says(rows: int, columns: int) -> None:
    scales = numbered(rows, columns)
    row_tiles, column_tiles = (rows + 127) // 128, (columns + 3) // 4
    expected = [0] * (row_tiles * column_tiles * 512)  # so padding is 0 too
    for m, row in enumerate(scales.tolist()):
        for k, scale in enumerate(row):
            tile = m // 128 * column_tiles + k // 4
            expected[tile * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4] = scale
    swizzled = swizzle.swizzle(scales)
    assert swizzled.shape == (128 * row_tiles, 4 * column_tiles)
    assert swizzled.shape == swizzle.padded_shape(rows, columns)
    assert swizzled.flatten().tolist() == expected


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_unswizzle_undoes_it_whatever_the_shape_of_the_bytes(rows: int, columns: int) -> None:
    scales = numbered(rows, columns)
    swizzled = swizzle.swizzle(scales)
    for stored in (swizzled, swizzled.flatten(), swizzled.view(swizzled.shape[0] // 4, -1)):
        assert torch.equal(swizzle.unswizzle(stored, rows, columns), scales)


def test_dtype_and_strides() -> None:
    scales = numbered(5, 40).t().view(torch.float8_e4m3fn)  # not contiguous
    swizzled = swizzle.swizzle(scales)
    assert swizzled.dtype == torch.float8_e4m3fn and swizzled.is_contiguous()
    back = swizzle.unswizzle(swizzled, 40, 5)
    assert back.dtype == torch.float8_e4m3fn and back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), numbered(5, 40).t())
