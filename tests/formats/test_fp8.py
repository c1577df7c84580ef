"""Static per-tensor FP8 against torch's own cast."""

import math

import torch

from nvfp4cli.formats import fp8


def test_codes_are_those_of_torch():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 100
    values = torch.cat([values, -values, torch.tensor([0.0, -0.0, 448, 449, 1e6, -1e6, 1e-9])])
    expected = (values / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = fp8.encode(values, 0.5)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(fp8.decode(codes, 0.5), expected.to(torch.float32) * 0.5)


def test_what_is_read_back_keeps_its_dtype():
    x = torch.tensor([1.0, -3.3, 0.0], dtype=torch.bfloat16)
    assert fp8.rounded(x, 1.0).tolist() == [1.0, -3.25, 0.0]
    assert fp8.rounded(x, 1.0).dtype == torch.bfloat16


def test_the_largest_value_is_met():
    scale = fp8.scale_of(7.0)
    assert scale == 7.0 / 448
    assert fp8.rounded(torch.tensor([7.0, -7.0]), scale).tolist() == [7.0, -7.0]


def test_a_scale_always_divides():
    for amax in (0.0, 1e-44, 448 * math.ldexp(1, -127)):
        assert fp8.scale_of(amax) == 1.0
