"""What becomes of the weights of a job: rounded to NVFP4 or to a dtype, or refused."""

import math
from collections.abc import Generator

import torch
from torch import Tensor

from nvfp4cli.errors import WeightError
from nvfp4cli.formats import nvfp4
from nvfp4cli.layouts.record import Stored
from nvfp4cli.layouts.sources import Source
from nvfp4cli.methods import scales
from nvfp4cli.models.pieces import upright
from nvfp4cli.plan.record import Job, Member
from nvfp4cli.rotate import fold

# What a member has become: a weight for the layout to write, a tensor, or nothing where it is
# streamed while it is written.
Result = Stored | Tensor | None
# Jobs as they are carried out, each with its warnings once its results are on their way.
Work = Generator[tuple[Job, list[str]], None, None]


def quantized(
    job: Job, tensors: list[Tensor], maxima: list[float], method: str
) -> tuple[list[Result], list[str]]:
    """The members of a group under one global scale, and warnings.

    tensors: [N, K] each, bf16, fp16 or fp32, edited already. maxima: their largest magnitudes, all
    finite. method: of the recipe.
    """
    group = max(maxima)
    scale = scales.global_scale(group, method)
    results: list[Result] = []
    warnings = []
    for i, member in enumerate(job.members):
        if nvfp4.vanishes(maxima[i]):
            size = "holds only zeros" if maxima[i] == 0 else f"is at most {maxima[i]:.1e}"
            warnings.append(f"{member.name} {size}: it is stored as zeros.")
        if nvfp4.vanishes(group):
            results.append(Stored(nvfp4.zeros(*member.shape)))
        else:
            results.append(Stored(scales.quantize(tensors[i], scale, method)))
    return results, warnings


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
    if member.piece or member.action == "quantize":
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
            quantize = member.action == "quantize"
            raise misfit(member, torch.float32 if quantize else member.outputs[0].dtype, read)


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
