"""NVFP4 encoding in Triton: one launch, one load, one store, the bits of `formats.nvfp4.quantize`.

Nothing here depends on how a backend rounds a cast, divides, fuses or treats subnormals: scales and
codes are rounded with additions and integers, divisions are IEEE's, products are kept from fusing
into the additions behind them. So the interpreter and every GPU from sm_80 on give the same bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats import e4m3
from nvfp4cli.formats.nvfp4 import BLOCK, GlobalScale, Quantized

ROWS = 64  # blocks of a program; any power of two gives the same bytes

_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_E4M3_SMALLEST = tl.constexpr(e4m3.SMALLEST)
_MAGIC = tl.constexpr(1.5 * 2**23)  # n + 1.5 * 2^23 is rounded to an integer, ties to even


@triton.jit
def _to_fp32(x: tl.tensor) -> tl.tensor:
    """Exact widening of bf16, fp16 or fp32. The interpreter's own is wrong for bf16 subnormals."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _e4m3_byte(v: tl.tensor) -> tl.tensor:
    """`e4m3.round_to_bytes`: non-negative fp32 -> nearest-even byte as int32, at most 126."""
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = (v + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.minimum(tl.where(bits < 0x3C800000, subnormal, normal), 126)


@triton.jit
def _e4m3_value(byte: tl.tensor) -> tl.tensor:
    """Byte 0..126 as int32 -> fp32. The type float8e4nv would need sm_89."""
    normal = ((byte << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * _E4M3_SMALLEST, normal)


@triton.jit
def _e2m1_code(y: tl.tensor) -> tl.tensor:
    """`e2m1.encode`: fp32 -> code 0..15 as int32.

    Each line of the reference is rounded by the addition that shifts it. The shorter formula
    through |y| * 2^-126 is wrong wherever subnormals are flushed.
    """
    a = tl.abs(y)
    code = tl.minimum(a * 2 + _MAGIC, a + (_MAGIC + 2))
    code = tl.minimum(tl.minimum(code, a * 0.5 + (_MAGIC + 4)), _MAGIC + 7)
    return (code.to(tl.int32, bitcast=True) & 7) | tl.where(y < 0, 8, 0)


@triton.jit
def _quantize_kernel(
    x_ptr: tl.tensor,  # [N, K/16, 16]
    packed_ptr: tl.tensor,  # uint8 [N, K/16, 8]
    scale_ptr: tl.tensor,  # uint8 [N, K/16]
    multiplier: tl.tensor,
    n_blocks: tl.tensor,
    blocks_per_row: tl.tensor,
    row_stride: tl.tensor,
    block_stride: tl.tensor,
    element_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program i encodes blocks i * ROWS ... of the N * K/16 blocks, counted along the rows."""
    # In int64: a tensor of more than 2^31 values overflows int32 offsets.
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    inside = block < n_blocks
    start = block // blocks_per_row * row_stride + block % blocks_per_row * block_stride
    offsets = start[:, None] + tl.arange(0, BLOCK).to(tl.int64)[None, :] * element_stride
    x = _to_fp32(tl.load(x_ptr + offsets, mask=inside[:, None], other=0.0))  # [ROWS, 16]

    amax = tl.max(tl.abs(x), axis=1)
    byte = _e4m3_byte(tl.div_rn(tl.div_rn(amax, 6.0), multiplier))
    byte = tl.where(amax > 0, tl.maximum(byte, 1), 0)
    decoded = tl.where(byte > 0, _e4m3_value(byte) * multiplier, 1.0)
    reciprocal = tl.minimum(tl.div_rn(1.0, decoded), _FP32_MAX)

    codes = tl.reshape(_e2m1_code(x * reciprocal[:, None]), (ROWS, BLOCK // 2, 2))
    even, odd = tl.split(codes)  # [ROWS, 8]
    packed = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(packed_ptr + packed, (even | (odd << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scale_ptr + block, byte.to(tl.uint8), mask=inside)


def quantize_triton(weight: Tensor, scale: GlobalScale) -> Quantized:
    """Round a matrix to NVFP4, bit for bit as `formats.nvfp4.quantize` does.

    weight: [N, K] bf16, fp16 or fp32, any strides, finite, K a multiple of 16, on a CUDA device
    (under TRITON_INTERPRET=1 on the CPU).
    """
    n, k = weight.shape
    kb = k // BLOCK
    x = weight.unflatten(1, (kb, BLOCK))
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scale_byte = torch.empty(n, kb, dtype=torch.uint8, device=weight.device)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _quantize_kernel[(triton.cdiv(n * kb, ROWS),)](
            x,
            packed,
            scale_byte,
            scale.multiplier,
            n * kb,
            kb,
            *x.stride(),
            ROWS=ROWS,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return Quantized(packed, scale_byte.view(torch.float8_e4m3fn), scale)
