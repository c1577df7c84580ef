"""GPTQ's inner loop, compiled on a GPU or, under TRITON_INTERPRET=1, interpreted on the CPU."""

import os

import pytest
import torch

from nvfp4cli.formats import e2m1
from nvfp4cli.kernels.compensate_torch import compensate_torch

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def kernel():
    from nvfp4cli.kernels import compensate_triton

    return compensate_triton.compensate_triton


@pytest.mark.parametrize(("columns", "rows"), [(16, 40), (48, 33), (1, 1), (128, 32), (128, 70)])
@pytest.mark.usefixtures("poison")
def test_the_bits_of_the_reference(kernel, columns: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    left = torch.randn(columns, rows, generator=generator)
    left[:, 0] = -0.0
    factors = torch.randn(columns, columns, generator=generator) / columns**0.5
    octaves = torch.randint(-9, 9, (columns, rows), generator=generator)
    reciprocal = torch.rand(columns, rows, generator=generator) * 2.0**octaves
    step = 1 / reciprocal
    expected = compensate_torch(left, factors, reciprocal, step)
    found = kernel(*(x.to(DEVICE) for x in (left, factors, reciprocal, step)))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu().view(torch.int32), theirs.view(torch.int32))


def test_every_tie(kernel) -> None:
    """Midpoints and their neighbours; beyond the range they saturate."""
    magnitudes = torch.tensor(e2m1.MAGNITUDES)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(x)) for x in (torch.inf, -torch.inf)]
    row = torch.cat([ties, *near, magnitudes, torch.tensor([6.5, 7.0, 1e9, 3e38])])
    row = torch.cat([row, -row])[None]
    one = torch.ones_like(row)
    values, _ = kernel(*(x.to(DEVICE) for x in (row, torch.zeros(1, 1), one, one)))
    assert torch.equal(values.cpu(), e2m1.decode(e2m1.encode(row)))
