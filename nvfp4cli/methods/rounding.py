"""What methods share that change a weight before it is rounded by a rule of the caller's."""

from collections.abc import Callable

import torch
from torch import Tensor

from nvfp4cli.formats.nvfp4 import Quantized

# A weight, fp32 [N, K], and the Hessian of its inputs, fp32 [K, K] -> the weight in NVFP4: by its
# block scales alone, or with errors compensated.
Rounding = Callable[[Tensor, Tensor], Quantized]


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """Sum over inputs x of the squared change of outputs, tr(D H D^T).

    difference: D of weights, fp32 [N, K]. hessian: the sum of x x^T, fp32 [K, K].
    """
    return ((difference @ hessian) * difference).sum(dtype=torch.float64).item()
