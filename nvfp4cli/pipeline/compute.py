"""What becomes of the weights of a job: rounded to NVFP4 or to a dtype, or refused."""

import itertools
import math
from collections.abc import Generator
from functools import partial

import torch
from torch import Tensor

from nvfp4cli import kernels
from nvfp4cli.calibrate.moments import Seen
from nvfp4cli.calibrate.statistics import Statistics
from nvfp4cli.errors import CheckpointError, WeightError
from nvfp4cli.formats import fp8, nvfp4
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.formats.nvfp4 import GlobalScale, Quantized
from nvfp4cli.layouts.record import CacheScales, Stored, StoredFp8
from nvfp4cli.layouts.sources import Source
from nvfp4cli.methods import gptq, refit, scales, svd
from nvfp4cli.models.pieces import upright
from nvfp4cli.plan.record import Job, Member
from nvfp4cli.recipe import COMPENSATED, Recipe
from nvfp4cli.rotate import fold

# What a member has become: a weight for the layout to write, a tensor, or nothing where it is
# streamed while it is written.
Result = Stored | StoredFp8 | CacheScales | Tensor | None
# Jobs as they are carried out, each with its warnings once its results are on their way.
Work = Generator[tuple[Job, list[str]], None, None]


def quantized(
    job: Job,
    tensors: list[Tensor],
    maxima: list[float],
    recipe: Recipe,
    statistics: Statistics | None,
    estimate: Tensor | None,
) -> tuple[list[Result], list[str]]:
    """The members of a group under one global scale, and warnings.

    tensors: [N, K] each, bf16, fp16 or fp32, edited already. maxima: their largest magnitudes, all
    finite. statistics: of their inputs, which weigh errors and give the input scale of w4a4.
    estimate: fp32 [K], what weighs errors without them; None: all columns alike.
    """
    group, method = max(maxima), recipe.block_scales
    scale = scales.global_scale(group, method)
    importance = None if estimate is None else estimate.to(tensors[0].device)
    input_scale = None
    if statistics is not None:
        seen = statistics.of([member.module for member in job.members])
        if method == "mse":
            importance = seen.mean_square.to(tensors[0].device) if seen.tokens else None
        if recipe.input_scales:
            input_scale = GlobalScale.from_amax(seen.amax)
    results: list[Result] = []
    for i, member in enumerate(job.members):
        if nvfp4.vanishes(group):
            results.append(Stored(nvfp4.zeros(*member.shape), input_scale))
        else:
            q = scales.quantize(tensors[i], scale, method, importance)
            results.append(Stored(q, input_scale))
    return results, _vanishing(job, maxima)


def _vanishing(job: Job, maxima: list[float]) -> list[str]:
    """Warnings of members that are stored as zeros."""
    found = []
    for member, maximum in zip(job.members, maxima, strict=True):
        if nvfp4.vanishes(maximum):
            size = "holds only zeros" if maximum == 0 else f"is at most {maximum:.1e}"
            found.append(f"{member.name} {size}: it is stored as zeros.")
    return found


def cache_scales(attention: str, statistics: Statistics | None, form: str) -> CacheScales:
    """The scales of the cache of an attention module. Raises CheckpointError without statistics."""
    if statistics is None or attention not in statistics.keys:
        raise CheckpointError(
            f"The statistics know nothing of the keys of {attention}: calibrate again with "
            "--kv-cache."
        )
    return CacheScales.from_amax(statistics.keys[attention], statistics.values[attention], form)


def calibrated(
    job: Job, tensors: list[Tensor], maxima: list[float], recipe: Recipe, seen: Seen
) -> tuple[list[Stored] | list[StoredFp8], list[str]]:
    """The members of a group by what has been seen of their input, and warnings.

    tensors, maxima: as of `quantized`. Under svd they share the first half of their branch.
    """
    if job.members[0].action == "fp8":
        return _in_fp8(tensors, recipe, seen), []
    input_scale = GlobalScale.from_amax(seen.amax) if recipe.input_scales else None
    if nvfp4.vanishes(max(maxima)):
        zeros = [_zeros(len(t), t.shape[1], recipe, input_scale) for t in tensors]
        return zeros, _vanishing(job, maxima)
    matrix = torch.cat([tensor.to(torch.float32) for tensor in tensors])
    if recipe.method in COMPENSATED:
        matrix = _refitted(matrix, seen)
    rounding = partial(_encoded, recipe=recipe, tokens=seen.whole.tokens)
    if recipe.method == "svd":
        # Fitted to inputs as the codes read them. The branch reads them before they are rounded,
        # and so leaves its share of that noise out of the outputs.
        q, branch = svd.decompose(matrix, seen.whole.hessian, recipe.rank, rounding)
        group = Stored(q, input_scale, branch)
    else:
        group = Stored(rounding(matrix, seen.whole.hessian), input_scale)
    stops = itertools.accumulate(len(tensor) for tensor in tensors)
    results = [group.rows(stop - len(t), stop) for t, stop in zip(tensors, stops, strict=True)]
    return results, _vanishing(job, maxima)


def _in_fp8(tensors: list[Tensor], recipe: Recipe, seen: Seen) -> list[StoredFp8]:
    """The members of a group under one scale."""
    matrix = torch.cat([tensor.to(torch.float32) for tensor in tensors])
    if recipe.method in COMPENSATED:
        matrix = _refitted(matrix, seen)
    scale = fp8.scale_of(kernels.amax(matrix))
    input_scale = fp8.scale_of(seen.amax) if recipe.scheme == "w4a4" else None
    values = fp8.encode(matrix, scale).split([len(tensor) for tensor in tensors])
    return [StoredFp8(part, scale, input_scale) for part in values]


def _zeros(n: int, k: int, recipe: Recipe, input_scale: GlobalScale | None) -> Stored:
    branch = LowRank.zeros(recipe.rank, n, k) if recipe.method == "svd" else None
    return Stored(nvfp4.zeros(n, k), input_scale, branch)


def _encoded(weight: Tensor, hessian: Tensor, *, recipe: Recipe, tokens: int) -> Quantized:
    """By the recipe's rule; hessian: of so many tokens."""
    rule = recipe.block_scales
    scale = scales.global_scale(kernels.amax(weight), rule)
    if recipe.method in COMPENSATED and gptq.enough(tokens, weight.shape[1]):
        return gptq.quantize(weight, hessian, scale, rule)
    weighed = rule in scales.WEIGHED and tokens > 0
    importance = scales.importance_of(hessian, rule) / tokens if weighed else None
    return scales.quantize(weight, scale, rule, importance)


def _refitted(weight: Tensor, seen: Seen) -> Tensor:
    """A weight for the inputs that the quantised model gives it; see `methods.refit`."""
    whole = seen.whole
    if whole.cross is None:
        return weight
    if whole.square is not None:
        return refit.keeping_power(weight, whole.hessian, whole.cross, whole.square, whole.tokens)
    fit, held_out = seen.fit, seen.held_out
    assert fit.cross is not None and held_out.cross is not None
    return refit.by_held_out(weight, (fit.hessian, fit.cross), (held_out.hessian, held_out.cross))


def stored(member: Member, source: Source) -> Tensor:
    """The tensor that a member is cut from or, of experts, its expert's part of it."""
    if member.piece and member.piece.expert is not None:
        return source.read_index(member.source.name, member.piece.expert)
    return source.read(member.source.name)


def matrix(member: Member, stored: Tensor) -> Tensor:
    """What a member is made of, [out, in] or [out]; stored: its tensor or, of experts, its own."""
    return member.piece.of(stored) if member.piece else upright(stored, member.transposed)


def edited(member: Member, data: Tensor, read: fold.Read) -> Tensor:
    """The member, or rows of it, as it is written or encoded; in fp32 or fp64 where edited."""
    if member.piece or member.quantized:
        whole = matrix(member, data)
        return fold.apply(whole, member.edits, read) if member.edits else whole
    if not member.edits:
        return data
    return fold.apply(data, member.edits, read, transposed=member.transposed)


def encodable(tensor: Tensor) -> Tensor:
    """The tensor in a dtype that the encoders take: NVFP4 is computed in fp32."""
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def rounded(edited: Tensor, member: Member, read: fold.Read) -> Tensor:
    """Round once to the stored dtype, refusing what does not fit it."""
    dtype = member.outputs[0].dtype
    result = edited.to(dtype)
    if not torch.isfinite(result).all():
        raise misfit(member, dtype, read)
    return result


def check_maxima(job: Job, maxima: list[float], read: fold.Read) -> None:
    """Raise WeightError for a member whose largest magnitude is not finite."""
    for member, maximum in zip(job.members, maxima, strict=True):
        if not math.isfinite(maximum):
            raise misfit(
                member, torch.float32 if member.quantized else member.outputs[0].dtype, read
            )


def misfit(member: Member, dtype: torch.dtype, read: fold.Read) -> WeightError:
    """Why the member is not finite in `dtype`: what it is made from is not, or its range.

    The sources are read again: a rotation has spread a NaN over whole rows of the edited tensor.
    """
    sources = [member.source.name, *(name for edit in member.edits for name in edit.reads)]
    for name in sources:
        nvfp4.check_finite(read(name), name)
    name = str(dtype).removeprefix("torch.")
    remedy = (
        "store it wider with --dtype bfloat16 or float32"
        if dtype == torch.float16
        else "scale the weight down, or keep it as it is with --ignore and --rotate none"
    )
    return WeightError(f"{member.name} leaves the range of {name}: {remedy}.")
