"""Rounding columns one after the other, in Triton: the bits of `compensate_torch`.

GPTQ's inner loop. The columns of a matrix depend on each other, its rows do not: a program keeps a
few rows of a block of columns in registers and goes through the columns, where a launch for every
column would take longer than its arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32  # of the matrix, in a program
_MAGIC = tl.constexpr(1.5 * 2**23)  # n + _MAGIC is rounded to an integer, ties to even


@triton.jit
def _nearest(y):
    """`e2m1.nearest`: fp32 to the nearest E2M1 value, the sign of zeros kept."""
    magnitude = tl.abs(y)
    code = tl.minimum(magnitude * 2 + _MAGIC, magnitude + (_MAGIC + 2))
    code = tl.minimum(code, magnitude * 0.5 + (_MAGIC + 4))
    code = tl.minimum(code, _MAGIC + 7) - _MAGIC
    value = tl.maximum(tl.maximum(code * 0.5, code - 2), code * 2 - 8)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _compensate_kernel(
    left_ptr,  # fp32 [C, N], of the columns of a matrix [N, C]
    factors_ptr,  # fp32 [C, C]
    reciprocal_ptr,  # fp32 [C, N]
    step_ptr,  # fp32 [C, N]
    values_ptr,  # fp32 [C, N]
    errors_ptr,  # fp32 [C, N]
    n,
    columns,
    COLUMNS: tl.constexpr,  # at least `columns`, a power of two
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = column[:, None] * n + row[None, :]  # a block has fewer than 2^31 values
    inside = row < n
    left = tl.load(left_ptr + place, mask=(column < columns)[:, None] & inside[None, :], other=0.0)
    for i in range(columns):
        here = i * n + row
        # One term and zeros: exact in any order.
        own = tl.sum(tl.where((column == i)[:, None], left, 0.0), axis=0) + 0.0  # no -0
        value = _nearest(own * tl.load(reciprocal_ptr + here, mask=inside, other=0.0))
        error = own - value * tl.load(step_ptr + here, mask=inside, other=0.0)
        tl.store(values_ptr + here, value, mask=inside)
        tl.store(errors_ptr + here, error, mask=inside)
        behind = (column > i) & (column < columns)
        factor = tl.load(factors_ptr + i * columns + column, mask=behind, other=0.0)
        left = left - factor[:, None] * error[None, :]


def compensate_triton(
    left: Tensor, factors: Tensor, reciprocal: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kernels.compensate`."""
    columns, n = left.shape
    values, errors = torch.empty_like(left), torch.empty_like(left)
    _compensate_kernel[(triton.cdiv(n, _ROWS),)](
        left.contiguous(),
        factors.contiguous(),
        reciprocal.contiguous(),
        step.contiguous(),
        values,
        errors,
        n,
        columns,
        COLUMNS=triton.next_power_of_2(columns),
        ROWS=_ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return values, errors
