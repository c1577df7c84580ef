"""What a served linear layer makes of its input before it multiplies.

Engines quantise activations while they run: every 16 neighbouring values get a block scale from
their own maximum. Above it stands a global scale that is fixed in the checkpoint, and values beyond
what it was made for saturate; or one that each batch gets from its own maximum.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.formats import e2m1, fp8
from nvfp4cli.formats.nvfp4 import BLOCK, SPAN, GlobalScale
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


# The smallest block scale of torchao, E4M3's smallest normal value, where others go down to 2^-9.
_LEAST = 2.0**-6


def dynamic(rule: Rule = "amax") -> Callable[[Tensor], Tensor]:
    """The rounding of inputs [tokens, K] under the global scale of all of them, amax / 2688.

    As torchao's `nvfp4_linear` has it (prototype/mx_formats/nvfp4_tensor.py): the tokens that are
    computed together share one scale, so the result depends on the batch. K: a multiple of 16.
    """

    def nearest(x: Tensor) -> Tensor:
        amax = x.abs().amax().to(torch.float32)
        # A tensor, since a GPU takes the reciprocal of a Python number. All zeros stay zeros.
        multiplier = (amax / amax.new_full((), SPAN)).clamp(min=torch.finfo(torch.float32).tiny)
        rounded = kernels.quantize_dequantize(x, multiplier.view(1)).view(-1, BLOCK)
        blocks = x.to(torch.float32).reshape(-1, BLOCK)
        maxima = blocks.abs().amax(dim=1)
        small = maxima / maxima.new_full((), e2m1.MAX) / multiplier < _LEAST
        unit = multiplier * _LEAST
        rounded[small] = (e2m1.nearest(blocks[small] / unit) * unit).to(x.dtype)
        return rounded.view(x.shape)

    def better(x: Tensor) -> Tensor:
        amax = x.abs().amax().item()
        if amax == 0:
            return x
        found = scales.quantize(x, scales.global_scale(amax, rule), rule)
        return kernels.dequantize(found, x.dtype)

    return nearest if rule == "amax" else better


def static_fp8(scale: float) -> Callable[[Tensor], Tensor]:
    """The rounding of inputs of any shape to E4M3 under a static scale, as stored: amax / 448."""
    return lambda x: fp8.rounded(x, scale)
