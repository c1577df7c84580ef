"""What a column counts where no text shows it: its input's second moment, from weights alone.

Inputs are taken for independent and of mean zero, and a normed stream for one of variance 1:

    norm      E[x_k^2] = g_k^2 + b_k^2
    linear    E[y_r^2] = sum_k W_rk^2 E[x_k^2] + b_r^2
    gated     E[(f(u) v)_r^2] = E[u_r^2] E[v_r^2], as if f(u) grew as u does

all of the tensors as they are written, folded and rotated. Sums are by halves and roots are of IEEE
754, so that every device and every number of threads gives the same bits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nvfp4cli.models.pieces import upright
from nvfp4cli.pipeline import compute
from nvfp4cli.plan.record import Feed, Member, Plan

_TILE = 1 << 22  # values at a time: 16 MiB in fp32


def estimate(plan: Plan, member: Member) -> Tensor | None:
    """What the squared error of each column counts: fp32 [K] on the host, the largest 1.

    None, for all alike, where the spec does not say what makes the input, or where that is zero
    everywhere or not finite.
    """
    feed = plan.feeds.get(member.name)
    if feed is None:
        return None
    moments = _moments(plan, feed)
    if not 0 < moments.max().item() < torch.inf:  # also a NaN
        return None
    return counted(moments)


def counted(moments: Tensor) -> Tensor:
    """Second moments to the power 1.25, the largest 1.

    The power is not of theory: with it SmolLM2-135M comes closer to its bf16 model than with 1,
    see docs/accuracy.md.
    """
    share = moments / moments.max()
    return share * share.sqrt().sqrt()


def _moments(plan: Plan, feed: Feed) -> Tensor:
    """fp32 [K]"""
    product = torch.ones(())
    for parts in feed.factors:
        product = product * _outputs(plan, parts, feed.offset)
    return product if feed.channels is None else product[torch.tensor(feed.channels)]


def _outputs(plan: Plan, parts: tuple[Member, ...], offset: float) -> Tensor:
    """The second moments of what a module puts out. parts: its weight and, if any, its bias."""
    total = torch.zeros(())
    for member in parts:
        if len(member.shape) == 2:
            feed = plan.feeds.get(member.name)
            inputs = None if feed is None else _moments(plan, feed)
            total = total + torch.cat([_row_sums(rows, inputs) for rows in _rows(plan, member)])
        else:
            (vector,) = _rows(plan, member)
            gain = member.name.endswith(".weight")
            total = total + (vector + offset if gain else vector).square()
    return total


def _rows(plan: Plan, member: Member) -> Iterator[Tensor]:
    """The tensor as it is written, before it is rounded: fp32, in tiles of rows if possible."""
    source, name = plan.source, member.source.name
    apart = member.piece or member.transposed or len(member.shape) != 2
    if apart or not all(edit.row_local for edit in member.edits):
        whole = compute.edited(member, compute.stored(member, source), source.read)
        turned = member.transposed and member.action != "quantize"
        yield upright(whole, turned).to(torch.float32)
        return
    rows, columns = member.shape
    step = max(1, _TILE // columns)
    for start in range(0, rows, step):
        data = source.read_rows(name, start, min(start + step, rows))
        yield compute.edited(member, data, source.read).to(torch.float32)


def _row_sums(weight: Tensor, inputs: Tensor | None) -> Tensor:
    """Of W_rk^2 E[x_k^2] over k: fp32 [R]. inputs: [K], None for ones."""
    terms = weight.square()
    if inputs is not None:
        terms = terms * inputs
    while (width := terms.shape[1]) > 1:
        half = (width + 1) // 2
        left, right = terms[:, :half].clone(), terms[:, half:]
        left[:, : width - half] += right
        terms = left
    return terms[:, 0]
