"""The same work as the kernels' by eager torch, torch.compile, torchao and a plain Triton kernel.

Their arithmetic is the usual one, which may differ in a bit from the reference's. Each function
takes bf16 [N, K] on a CUDA device and returns the codes, uint8 [N K/16, 8], and the block scales,
float8_e4m3fn [N K/16].
"""

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4cli.formats import e2m1
from nvfp4cli.formats.nvfp4 import BLOCK
from nvfp4cli.rotate.hadamard import hadamard


@cache
def sylvester() -> Tensor:
    return (hadamard(16).float() / 4).to("cuda", torch.bfloat16)


@cache
def compiled_quantize() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(eager)


@cache
def compiled_rotated() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(lambda x, h, g: eager((x.view(-1, 16) @ h).view(x.shape), g))


@cache
def compiled_gated() -> Callable[..., tuple[Tensor, Tensor]]:
    def gated(gate: Tensor, up: Tensor, h: Tensor, g: float) -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.silu(gate) * up
        return eager((y.view(-1, 16) @ h).view(y.shape), g)

    return torch.compile(gated)


def eager(x: Tensor, multiplier: float) -> tuple[Tensor, Tensor]:
    """The reference's arithmetic in the fewest eager operations, for torch.compile."""
    scale, blocks = scales(x, multiplier)
    return codes(blocks, scale, multiplier), scale


def scales(x: Tensor, multiplier: float) -> tuple[Tensor, Tensor]:
    blocks = x.view(-1, BLOCK).float()
    ratio = blocks.abs().amax(dim=1) / 6 / multiplier
    return ratio.clamp(max=448).to(torch.float8_e4m3fn), blocks


def codes(blocks: Tensor, scale: Tensor, multiplier: float) -> Tensor:
    decoded = scale.float() * multiplier
    y = blocks * torch.where(decoded > 0, 1 / decoded, 0.0)[:, None]
    return e2m1.pack(e2m1.encode(y))


@cache
def _stages() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return (
        torch.compile(lambda x, g: scales(x, g)[0]),
        torch.compile(lambda x, s, g: codes(x.view(-1, BLOCK).float(), s, g)),
    )


def three_kernels(x: Tensor, multiplier: float) -> tuple[Tensor, Tensor]:
    """Rotate through memory, reduce to scales, encode: each a kernel of its own."""
    rotated = (x.view(-1, 16) @ sylvester()).view(x.shape)
    find_scales, encode = _stages()
    scale = find_scales(rotated, multiplier)
    return encode(rotated, scale, multiplier), scale


@triton.jit
def _plain_kernel(
    x_ptr,  # [blocks, 16]
    h_ptr,  # fp32 [16, 16]
    packed_ptr,  # uint8 [blocks, 8]
    scale_ptr,  # float8e4nv [blocks]
    multiplier,
    blocks,
    ROWS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """One block a row of a tile, the rotation a product with H, codes by seven comparisons."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 16)
    inside = row < blocks
    x = tl.load(x_ptr + row[:, None] * 16 + column, mask=inside[:, None], other=0.0).to(tl.float32)
    if ROTATE:
        x = tl.dot(x, tl.load(h_ptr + column[:, None] * 16 + column), input_precision="ieee")
    ratio = tl.max(tl.abs(x), axis=1) / 6.0 / multiplier
    exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(ratio, 1e-30))), -6.0)
    step = tl.exp2(exponent - 3.0)
    scale = tl.minimum(tl.floor(ratio / step + 0.5) * step, 448.0).to(tl.float8e4nv)
    decoded = scale.to(tl.float32) * multiplier
    y = x / tl.where(decoded == 0, 1.0, decoded)[:, None]
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5) + (a > 5.0) + tl.where(y < 0, 8, 0)
    low, high = tl.split(tl.reshape(code.to(tl.uint8), (ROWS, 8, 2)))
    place = packed_ptr + row[:, None] * 8 + tl.arange(0, 8)
    tl.store(place, low | (high << 4), mask=inside[:, None])
    tl.store(scale_ptr + row, scale, mask=inside)


def plain_triton(x: Tensor, multiplier: float, rotate: bool) -> tuple[Tensor, Tensor]:
    """The fused kernel as one first writes it."""
    blocks = x.numel() // BLOCK
    packed = torch.empty(blocks, BLOCK // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(blocks, dtype=torch.float8_e4m3fn, device=x.device)
    grid = (triton.cdiv(blocks, 16),)
    _plain_kernel[grid](x, sylvester().float(), packed, scale, multiplier, blocks, 16, rotate)
    return packed, scale


@cache
def torchao() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """torchao's nvfp4_quantize(x, global scale as fp32 []), compiled; None if not installed."""
    if importlib.util.find_spec("torchao") is None:
        return None
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    return torch.compile(lambda x, scale: nvfp4_quantize(x, BLOCK, scale))
