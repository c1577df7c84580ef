"""Low-rank branches beside quantised weights: whether a run can write them, and their tensors."""

from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import RecipeError, UnsupportedError
from nvfp4cli.layouts import LAYOUTS, branch
from nvfp4cli.layouts.record import Layout
from nvfp4cli.plan.record import Job
from nvfp4cli.recipe import Recipe


def rank(recipe: Recipe) -> int | None:
    """Of the branch beside every quantised matrix, None where a run adds none."""
    return recipe.rank if recipe.scheme != "none" and recipe.method == "svd" else None


def outputs(module: str, shape: tuple[int, ...], recipe: Recipe) -> tuple[Output, ...]:
    """What is written of a matrix [out, in] beside its codes and scales."""
    wanted = rank(recipe)
    return () if wanted is None else branch.outputs(module, (shape[0], shape[1]), wanted)


def check_layout(recipe: Recipe, layout: Layout | None) -> None:
    """Raise UnsupportedError where the layout cannot hold the branches of a run.

    RecipeError where other modules are to be in FP8: engines' mixed form has no branches.
    """
    if rank(recipe) is not None and recipe.bits is not None:
        raise RecipeError(
            "--bits mixes formats, and branches stand beside NVFP4 in every module: use another "
            "--method, or leave out --bits."
        )
    if rank(recipe) is not None and layout is not None and not layout.BRANCHES:
        holders = " or ".join(name for name, other in LAYOUTS.items() if other.BRANCHES)
        raise UnsupportedError(
            f"The {layout.NAME} layout cannot hold the low-rank branches of SVDQuant: use --layout "
            f"{holders}, or another --method."
        )


def check_sizes(jobs: list[Job], recipe: Recipe) -> None:
    """Raise RecipeError for matrices that have no branch of the recipe's rank.

    Members of a group count as one matrix, since they share the first half of their branch.
    """
    wanted = rank(recipe)
    if wanted is None:
        return
    for job in jobs:
        first = job.members[0]
        if first.action != "quantize":
            continue
        size = min(sum(member.shape[0] for member in job.members), first.shape[1])
        if size < wanted:
            raise RecipeError(
                f"{first.fused or first.module} has no branch of rank {wanted}, since the smaller "
                f"side of its matrix is {size}: lower --rank, or keep it with --ignore."
            )
