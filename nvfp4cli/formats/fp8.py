"""E4M3 under one scale for a whole tensor: value = code * scale, the scale amax / 448.

What engines call static per-tensor FP8, of weights, of activations and of KV caches.
"""

import torch
from torch import Tensor

from nvfp4cli.formats import e4m3

_SIGN = 0x80


def scale_of(amax: float) -> float:
    """The fp32 scale of values up to amax; 1 where that is 0, or below what fp32 divides by."""
    scale = torch.tensor(amax / e4m3.MAX, dtype=torch.float32).item()
    return scale if scale >= torch.finfo(torch.float32).tiny else 1.0


def encode(x: Tensor, scale: float) -> Tensor:
    """Nearest-even float8_e4m3fn of x / scale, saturating at 448.

    x: any shape and float dtype, finite; computed in fp32.
    """
    ratio = x.to(torch.float32) / scale
    sign = torch.where(torch.signbit(ratio), _SIGN, 0).to(torch.uint8)
    return (e4m3.round_to_bytes(ratio.abs()) | sign).view(torch.float8_e4m3fn)


def decode(codes: Tensor, scale: float) -> Tensor:
    """float8_e4m3fn of any shape -> fp32."""
    return e4m3.decode(codes) * scale


def rounded(x: Tensor, scale: float) -> Tensor:
    """x as it is read back from FP8, in its own dtype."""
    return decode(encode(x, scale), scale).to(x.dtype)
