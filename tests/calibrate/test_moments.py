"""Second moments, summed in parts."""

import torch

from nvfp4cli.calibrate.moments import Moments, Seen


def draw(tokens: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def test_they_are_those_of_all_tokens():
    for width in (16, 50):
        served, full = draw(70, width, 0), draw(70, width, 1)
        cpu = torch.device("cpu")
        parts = [Moments.zeros(width, cpu, cross=True, square=True) for _ in range(2)]
        for moments, rows in zip(parts, (slice(0, 30), slice(30, 70)), strict=True):
            for x, y in zip(served[rows].split(16), full[rows].split(16), strict=True):
                moments.add(x, y)
        whole = parts[0] + parts[1]
        assert whole.tokens == Seen(1.0, *parts).whole.tokens == 70
        torch.testing.assert_close(whole.hessian, served.T @ served, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(whole.cross, full.T @ served, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(whole.square, full.T @ full, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(whole.hessian, whole.hessian.T)
        torch.testing.assert_close(whole.mean_square, served.square().mean(dim=0))


def test_what_is_not_asked_for_is_not_summed():
    one = Moments.zeros(16, torch.device("cpu"))
    one.add(draw(4, 16, 0), draw(4, 16, 0))
    assert (one + one).cross is None
    assert one.square is None
    assert not Moments.zeros(16, torch.device("cpu")).mean_square.any()
