"""SVDQuant: a branch of low rank in bf16 carries what 4 bits carry worst.

Li et al., "SVDQuant" (arXiv:2411.05007), starts from the weight's largest singular directions and
rounds what they leave. Here the branch is then fitted to the error that rounding has made, and the
rest rounded again, a few times over. Of the errors E = W - Q, what a branch of rank r can take away
under the Hessian H of the inputs is decided by the r largest directions U of E H E^T (Eckart and
Young, of E H^(1/2)): the branch is U (U^T E), and no root of H is needed. It takes no output
further from what it should be, whatever the input, since (1 - U U^T) E x is no longer than E x; so
a short calibration text can make it useless, not harmful.
"""

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.formats.nvfp4 import Quantized
from nvfp4cli.methods.rounding import Rounding, output_error

_ROUNDS = 4
_EXTRA = 16  # directions beyond the rank that are followed, so that its last ones are found too
_ITERATIONS = 4


def decompose(
    weight: Tensor, hessian: Tensor, rank: int, rounding: Rounding
) -> tuple[Quantized, LowRank]:
    """A weight as a quantised one and a branch, whose sum changes outputs least.

    weight: fp32 [N, K], the members of a group one below the other, which share the first half of
    the branch. hessian: fp32 [K, K], the sum of x x^T over inputs x; without any input every column
    counts the same. rank: from 1 to the smaller of N and K. rounding: of what the branch leaves.

    Deterministic. Raises ValueError for a rank that there is not.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"a matrix of {list(weight.shape)} has no branch of rank {rank}")
    even = torch.eye(weight.shape[1], device=weight.device)
    if not bool(hessian.any()):
        hessian = even
    branch, least, best = _leading(weight, even, rank), None, None
    for _ in range(_ROUNDS):
        quantized = rounding(weight - branch.product(), hessian)
        missing = weight - kernels.dequantize(quantized, torch.float32)
        branch = _leading(missing, hessian, rank)
        error = output_error(missing - branch.product(), hessian)
        if least is not None and error >= least:
            break
        least, best = error, (quantized, branch)
    assert best is not None
    return best


def _leading(error: Tensor, hessian: Tensor, rank: int) -> LowRank:
    """The branch of a rank that takes most away of an error, fp32 [N, K].

    By subspace iteration (Halko et al., arXiv:0909.4061): a decomposition of the whole would take
    minutes for a layer of 14336 columns. The two agree to some parts in a thousand in what is left
    of the error.
    """
    generator = torch.Generator().manual_seed(0)
    size = min(rank + _EXTRA, len(error))
    basis = torch.randn(len(error), size, generator=generator).to(error.device)
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(error @ (hessian @ (error.T @ basis))).Q
    seen = error.T @ basis  # [K, size]
    _, turn = torch.linalg.eigh(seen.T @ (hessian @ seen))  # in ascending order
    up = (basis @ turn[:, -rank:]).to(torch.bfloat16)
    # From the rounded half, so that the other makes good what it can.
    return LowRank((up.to(torch.float32).T @ error).to(torch.bfloat16), up)
