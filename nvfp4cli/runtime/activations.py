"""What a served linear layer makes of its input before it multiplies.

Engines quantise activations while they run: every 16 neighbouring values get a block scale from
their own maximum, under a global scale that is fixed in the checkpoint. Values beyond what that
scale was made for saturate.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.formats import fp8
from nvfp4cli.formats.nvfp4 import SPAN, GlobalScale
from nvfp4cli.methods import scales

# How the scale of a block is chosen: from its maximum as engines do, or the better of two, which no
# engine does yet ("Four Over Six", arXiv:2512.02010).
Rule = Literal["amax", "four-over-six"]


def static(scale: GlobalScale, rule: Rule = "amax") -> Callable[[Tensor], Tensor]:
    """The rounding of inputs [tokens, K] under a static input scale, as stored: amax / 2688.

    Returns a function to the same shape and dtype. K must be a multiple of 16.
    """
    if rule == "amax":
        multiplier = torch.tensor([scale.multiplier])

        def nearest(x: Tensor) -> Tensor:
            return kernels.quantize_dequantize(x, multiplier.to(x.device))

        return nearest
    roomy = scales.global_scale(scale.multiplier * SPAN, rule)

    def better(x: Tensor) -> Tensor:
        return kernels.dequantize(scales.quantize(x, roomy, rule), x.dtype)

    return better


def static_fp8(scale: float) -> Callable[[Tensor], Tensor]:
    """The rounding of inputs of any shape to E4M3 under a static scale, as stored: amax / 448."""
    return lambda x: fp8.rounded(x, scale)
