import math
from fractions import Fraction

import pytest
import torch

from nvfp4cli.formats import rotation
from nvfp4cli.rotate.hadamard import hadamard


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("size", [1, 2, 16, 128, 1024])
def test_butterflies_are_the_product_with_sylvesters_matrix(size):
    x = torch.randint(-8, 9, (5, size)).float()  # sums of integers are exact
    assert torch.equal(rotation.butterflies(x), x @ hadamard(size).float())


@pytest.mark.parametrize("size", rotation.BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_block_hadamard(size, dtype):
    x = sample(3, 256).to(dtype)
    signs = torch.where(sample(size) < 0, -1, 1)
    h = hadamard(size).double() / math.sqrt(size)
    exact = (x.double().unflatten(-1, (-1, size)) * signs) @ h
    rotated = rotation.block_hadamard(x, size, signs)
    assert rotated.dtype == torch.float32
    # log2(size) sums and a product, each off by half a unit in the last place of the partial sums.
    bound = (math.log2(size) + 2) * 2.0**-24 * exact.abs().amax() * math.sqrt(size)
    assert (rotated.double() - exact.flatten(-2)).abs().max() < bound


def test_block_hadamard_twice_is_the_input():
    x = torch.randint(-8, 9, (4, 64)).float()
    for size in (16, 64):  # whose factors are exact
        assert torch.equal(rotation.block_hadamard(rotation.block_hadamard(x, size), size), x)


@pytest.mark.parametrize(("m", "k"), [(1, 64), (12, 8), (20, 4), (28, 2), (36, 1)])
def test_hadamard_rows(m, k):
    dense = hadamard(m) if m > 1 else None
    x = torch.randint(-8, 9, (3, m * k)).float()
    full = torch.kron(hadamard(m), hadamard(k)).float()
    rotated = rotation.hadamard_rows(x, dense)
    assert torch.equal(rotated, x @ full * rotation.normalizer(m * k))


def test_silu_mul():
    gate = torch.linspace(-63, 80, 100_001)
    up = sample(100_001)
    exact = gate.double() * gate.double().sigmoid() * up.double()
    error = (rotation.silu_mul(gate, up).double() - exact).abs() / exact.abs().clamp(min=1e-60)
    assert error.max() < 1e-4


def test_silu_mul_far_out():
    gate = torch.tensor([-3e38, -1000.0, -0.0, 0.0, 1000.0, 3e38])
    out = rotation.silu_mul(gate, torch.ones(6))
    assert out[2:].tolist() == [0, 0, 1000.0, gate[5].item()]
    assert (out[:2] <= 0).all() and (out[:2] >= gate[:2] * 2.0**-90).all()


def test_silu_mul_rounds_its_fused_sums_once(monkeypatch):
    """In float64 they are exact, so that nothing is rounded before it is rounded to fp32."""

    def checked(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
        total = a.double() * b + c
        columns = torch.broadcast_tensors(a, torch.as_tensor(b), torch.as_tensor(c), total)
        for x, y, z, found in zip(*(column.tolist() for column in columns), strict=True):
            assert Fraction(x) * Fraction(y) + Fraction(z) == Fraction(found)
        return total.float()

    monkeypatch.setattr(rotation, "_fma", checked)
    # share = SHARE - gate / 128 by its ends, by the powers of two below them, and in between.
    shares = torch.tensor([0.0, 2.0**-20, 0.125, 0.25, 0.5, 1.0])
    edges = (rotation.SHARE - shares) * 128
    near = [torch.nextafter(edges, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    tiny = torch.tensor([2.0**-149, 1e-30, 2.0**-24, 1e-5, 3e38])
    gate = torch.cat([edges, *near, tiny, -tiny, sample(300) * 3, sample(300) * 30])
    rotation.silu_mul(gate, torch.ones_like(gate))


def test_silu_mul_has_no_subnormal_products():
    tiny = 2.0 ** torch.arange(-149, 0, 7)
    out = rotation.silu_mul(tiny[:, None], tiny).abs()
    assert ((out == 0) | (out >= rotation.SMALLEST_GATED)).all()
    assert (rotation.silu_mul(torch.full_like(tiny, 3e38), tiny)[tiny < 2.0**-126] == 0).all()
