"""Jobs that write the scales of a KV cache, which come from calibration."""

from collections.abc import Mapping

from nvfp4cli.errors import RecipeError, UnsupportedError
from nvfp4cli.formats.nvfp4 import BLOCK
from nvfp4cli.layouts import LAYOUTS
from nvfp4cli.layouts.record import Layout
from nvfp4cli.layouts.sources import Source
from nvfp4cli.models.claims import Claim
from nvfp4cli.models.sizes import Sizes
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.plan.record import Job, Member
from nvfp4cli.recipe import Recipe

# The last part of the names of projections that values come from, alone or with others.
_VALUES = ("v_proj", "qkv_proj", "query_key_value", "c_attn")


def with_scales(
    jobs: list[Job],
    claims: Mapping[str, Claim | None],
    source: Source,
    spec: ArchSpec,
    layout: Layout,
) -> list[Job]:
    """The jobs, each layer's with one for the scales of its KV cache behind them.

    Raises UnsupportedError where no attention of the usual kind is found, or another state is kept
    beside keys and values.
    """
    found: dict[str, Job] = {}
    stateful = {one.layer for one in claims.values() if one and one.module.endswith(".conv1d")}
    for name, one in claims.items():
        if one is None or one.part != "weight" or one.layer is None or one.mtp:
            continue
        attention, _, last = one.module.rpartition(".")
        if last not in _VALUES:
            continue
        if one.layer in stateful:
            raise UnsupportedError(
                f"Layer {one.layer} of {spec.model_type} keeps the state of a convolution beside "
                "keys and values, so that its cache cannot be watched: leave out --kv-cache."
            )
        outputs = layout.cache_outputs(attention)
        member = Member(name, attention, source.tensors[name], (), "cache", "KV cache", (), outputs)
        stage = f"layer {one.layer}"
        found[stage] = Job(stage, (member,))
    if not found:
        raise UnsupportedError(
            f"The spec of {spec.model_type} names no value projection, so that it cannot "
            "be said what its KV cache holds: leave out --kv-cache."
        )
    last_of = {job.stage: place for place, job in enumerate(jobs)}
    behind = {last_of[stage]: job for stage, job in found.items()}
    return [
        one
        for place, job in enumerate(jobs)
        for one in ((job, behind[place]) if place in behind else (job,))
    ]


def check_format(recipe: Recipe, layout: Layout, spec: ArchSpec, sizes: Sizes) -> None:
    """Raise where the layout has no place for caches in this format, or heads have no blocks."""
    if recipe.kv_cache not in layout.CACHES:
        fit = [name for name, other in LAYOUTS.items() if recipe.kv_cache in other.CACHES]
        raise RecipeError(
            f"The {layout.NAME} layout holds no scales of a KV cache in {recipe.kv_cache}: use "
            f"--layout {' or '.join(fit)}, or --kv-cache {layout.CACHES[0]}."
        )
    head = spec.value_path.get("head_dim")
    if recipe.kv_cache == "nvfp4" and head is not None and sizes.of(head) % BLOCK:
        raise UnsupportedError(
            f"The heads of this model have {sizes.of(head)} channels, which are no blocks of "
            f"{BLOCK}: use --kv-cache fp8."
        )
