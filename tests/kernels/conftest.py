"""Matrices and scales that every encoder must turn into the bytes of `formats.nvfp4.quantize`."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from nvfp4cli.formats import e2m1, e4m3
from nvfp4cli.formats.nvfp4 import BLOCK, SPAN, GlobalScale, Quantized, amax, quantize

ONE = GlobalScale(1.0, 1.0)
Case = tuple[Tensor, GlobalScale]


def spread(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Blocks from about 2^-12 to 2^12, so that block scales cover normal, subnormal and 0x01."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-12, 13, (rows, columns // BLOCK, 1), generator=generator)
    blocks = torch.randn(rows, columns // BLOCK, BLOCK, generator=generator)
    return (blocks * 2.0**exponents).view(rows, columns).to(dtype)


def scaled(weight: Tensor) -> Case:
    return weight, GlobalScale.from_amax(amax(weight))


def every_finite(dtype: torch.dtype) -> Tensor:
    """All finite values of a 16-bit type, so also both zeros and all subnormals. [N, 16]"""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()].view(-1, BLOCK)


def around_ties() -> Case:
    """Every midpoint of E2M1 and its fp32 neighbours, in blocks whose scale is exactly 1."""
    magnitudes = torch.tensor(e2m1.MAGNITUDES)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    inf = torch.tensor(torch.inf)
    near = torch.cat([ties, torch.nextafter(ties, inf), torch.nextafter(ties, -inf)])
    values = torch.cat([near, -near, magnitudes, -magnitudes, magnitudes[:2]]).view(-1, 15)
    return torch.cat([values, torch.full((len(values), 1), e2m1.MAX)], dim=1), ONE


def block_scales(*scales: float) -> Case:
    """One block for each block scale before rounding; multiplier 1."""
    weight = torch.zeros(len(scales), BLOCK)
    weight[:, 3] = torch.tensor(scales) * -6
    weight[:, 8] = torch.tensor(scales)
    return weight, ONE


def around_scale_ties() -> Case:
    """Block maxima by the midpoints of E4M3, where amax/6/g and amax/(6g) round apart."""
    scales = e4m3.decode(torch.arange(e4m3.MAX_BYTE + 1, dtype=torch.uint8))
    scale = GlobalScale.from_amax(1.1)
    midpoints = (scales[1:] + scales[:-1]) / 2 * 6 * scale.multiplier
    near = midpoints.view(torch.int32) + torch.arange(-2, 3)[:, None]
    weight = torch.zeros(near.numel(), BLOCK)
    weight[:, 5] = near.to(torch.int32).view(torch.float32).flatten()
    return weight, scale


def zero_blocks() -> Case:
    weight = spread(4, 64)
    weight[1] = 0
    weight[2, 16:32] = -0.0
    return scaled(weight)


def tiny_beside_huge() -> Case:
    weight = torch.full((2, 32), 1e-30)
    weight[0, 3], weight[1, 20] = 3e38, -1e-45
    return scaled(weight)


def smallest_multiplier() -> Case:
    """Products of scales are subnormal and their reciprocals overflow."""
    amax_ = SPAN * 2.0**-126
    exponents = torch.linspace(-149, -115, 20 * BLOCK)
    return (amax_ * 2.0**115 * 2.0**exponents).view(20, BLOCK), GlobalScale.from_amax(amax_)


CASES: dict[str, Callable[[], Case]] = {
    "bf16": lambda: scaled(spread(67, 160)),
    "fp16": lambda: scaled(spread(67, 160, torch.float16)),
    "fp32": lambda: scaled(spread(67, 160, torch.float32)),
    "transposed": lambda: scaled(spread(48, 64).t()),
    "every second column": lambda: scaled(spread(19, 96)[:, ::2]),
    "slice": lambda: scaled(spread(40, 96)[3::2, 7:71]),
    "broadcast row": lambda: scaled(spread(1, 64).expand(5, 64)),
    "one row": lambda: scaled(spread(1, 16)),
    "zero tensor": lambda: scaled(torch.zeros(3, 32)),
    "zero blocks": zero_blocks,
    "tiny beside huge": tiny_beside_huge,
    "smallest multiplier": smallest_multiplier,
    "every bf16": lambda: (every_finite(torch.bfloat16), GlobalScale.from_amax(2.0**20)),
    "every fp16": lambda: scaled(every_finite(torch.float16)),
    "codes overflow": lambda: (every_finite(torch.bfloat16)[::9], GlobalScale.from_amax(2.0**-114)),
    "codes underflow": lambda: (every_finite(torch.bfloat16)[::9], GlobalScale.from_amax(2.0**127)),
    "around ties": around_ties,
    "around scale ties": around_scale_ties,
    "block scales": lambda: block_scales(126.24, 449, 464, 480, 3 * 2.0**-10, 1.0625, 2.0**-12),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """A matrix on the CPU and the scale to encode it with."""
    return CASES[request.param]()


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for most matrices: the interpreter's time is that of starting programs."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from nvfp4cli.kernels import amax_triton, dequantize_triton, quantize_triton

    for module in (amax_triton, dequantize_triton, quantize_triton):
        monkeypatch.setattr(module, "TILE", 1024)
    monkeypatch.setattr(quantize_triton, "_GATED_TILE", 1024)


@pytest.fixture
def poison() -> Iterator[None]:
    """`torch.empty` returns 255 in bytes and NaN in floats: nothing may be left unwritten."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def assert_reference() -> Callable[[Quantized, Case], None]:
    """Compare an encoder's answer for a case with the reference, byte for byte."""

    def check(answer: Quantized, case: Case) -> None:
        expected = quantize(*case)
        assert answer.global_scale == expected.global_scale
        assert answer.block_scale.dtype == torch.float8_e4m3fn
        pairs = (answer.packed, expected.packed), (answer.block_scale, expected.block_scale)
        for bytes_, expected_bytes in pairs:
            got = bytes_.view(torch.uint8).cpu()
            torch.testing.assert_close(got, expected_bytes.view(torch.uint8), rtol=0, atol=0)

    return check
