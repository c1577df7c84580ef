"""Rounding columns one after the other, each error made good by those that follow, in torch.

What `compensate_triton` equals bit for bit.
"""

import torch
from torch import Tensor

from nvfp4cli.formats import e2m1


def compensate_torch(
    left: Tensor, factors: Tensor, reciprocal: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kernels.compensate`."""
    left, values, errors = left.clone(), torch.empty_like(left), torch.empty_like(left)
    product = torch.empty_like(left)
    for i in range(len(left)):
        column = left[i] + 0.0  # -0 becomes 0, as in `e2m1.encode`
        values[i] = e2m1.nearest(column * reciprocal[i])
        errors[i] = column - values[i] * step[i]
        # Product and difference are rounded apart, as the kernel does.
        rest = torch.mul(factors[i, i + 1 :, None], errors[i], out=product[i + 1 :])
        left[i + 1 :].sub_(rest)
    return values, errors
