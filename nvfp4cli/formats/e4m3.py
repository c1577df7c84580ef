"""E4M3 block scales as bytes: rounded with integers, so that every backend gives the same bits.

The casts of backends cannot be trusted for this: Triton's interpreter loses carries (7.98 -> 4),
hides Inf and differs between versions. The formula equals torch's nearest-even cast on all
1,140,850,688 fp32 patterns in [0, 512].
"""

import torch
from torch import Tensor

MAX = 448.0
MAX_BYTE = 126  # 0x7E; 0x7F is NaN
SMALLEST = 2.0**-9  # byte 0x01, the smallest subnormal
NAN_BYTE = 0x7F

_SMALLEST_NORMAL = 8  # the code of 2^-6
_SUBNORMAL_MAGIC = 16384.0  # 2^14: adding it moves 2^-9 onto fp32's last mantissa bit
_SUBNORMAL_BITS = 0x46800000  # fp32 bits of 2^14
_REBIAS = (127 - 7) << 3  # exponent bias of fp32 minus that of E4M3, above 3 mantissa bits


def round_to_bytes(v: Tensor) -> Tensor:
    """Nearest-even E4M3 byte of non-negative fp32 values, saturating at 448 (byte 126).

    v: any shape, fp32, no NaN. Returns uint8 of the same shape.
    """
    bits = v.view(torch.int32)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - _REBIAS
    subnormal = (v + _SUBNORMAL_MAGIC).view(torch.int32) - _SUBNORMAL_BITS
    # Below 2^-6, whose code is 8, the subnormal code is the larger one, above it the normal one.
    code = torch.maximum(normal, subnormal.clamp(max=_SMALLEST_NORMAL))
    return code.clamp(max=MAX_BYTE).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """E4M3 bytes (uint8 or float8_e4m3fn) of any shape -> fp32; 0x7F and 0xFF become NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)
