"""The plan of `nvfp4 convert`: the same codes and block scales in another layout."""

from pathlib import Path
from typing import Any

import yaml

from nvfp4cli.checkpoint.files import RECORD
from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.layouts import LAYOUTS, StoredWeights, open_weights
from nvfp4cli.layouts.record import Layout
from nvfp4cli.models import spec as specs
from nvfp4cli.plan import advice
from nvfp4cli.plan.assemble import assemble
from nvfp4cli.plan.record import Facts, Job, Member, Plan
from nvfp4cli.recipe import Recipe, load

_HEAD = "lm_head"


def plan_convert(checkpoint: Checkpoint, layout_name: str, max_shard_size: str | None) -> Plan:
    """Decide how every tensor of an NVFP4 checkpoint is repacked.

    Raises UnsupportedError where the checkpoint holds no NVFP4 weights, or something that the
    other layout cannot hold.
    """
    weights = open_weights(checkpoint)
    layout = LAYOUTS[layout_name]
    if weights.layout is None:
        raise UnsupportedError(
            f"{checkpoint.folder} holds no NVFP4 weights: quantise it first with `nvfp4 quantize`."
        )
    _check_representable(weights, layout)
    origin = _origin(checkpoint.folder)
    recipe = origin["recipe"].merged(layout=layout_name, max_shard_size=max_shard_size)
    jobs = [_job(name, weights, layout) for name in weights.names]
    # Reading goes through the source's files from front to back.
    jobs.sort(key=lambda job: (job.members[0].source.file, job.members[0].source.start))
    facts = Facts(
        model=origin["model"],
        rotation=origin["rotation"],
        kept=tuple(_kept(weights)),
        copies=(),
        untied=False,
        warnings=tuple(advice.warnings(jobs, layout)),
        next_step=advice.next_step(jobs, layout),
        spec_text="",
        own_spec=True,
    )
    return assemble(weights, recipe, layout, jobs, facts)


def _check_representable(weights: StoredWeights, layout: Layout) -> None:
    caches = [n for n in weights.auxiliary if n.endswith((".k_scale", ".v_scale"))]
    if caches:
        raise UnsupportedError(
            f"{caches[0]} scales a KV cache, which `convert` does not carry over yet: quantise "
            "the source model again in the layout you need."
        )
    if weights.activations and not layout.INPUT_SCALES:
        holders = ", ".join(name for name, other in LAYOUTS.items() if other.INPUT_SCALES)
        raise UnsupportedError(
            f"The {layout.NAME} layout cannot hold the static input scales of this checkpoint: "
            f"choose one of {holders}."
        )


def _kept(weights: StoredWeights) -> list[str]:
    """Modules that an engine could take for linear ones to be quantised.

    Those of two-dimensional weights except embeddings, which have an embedding's name in every
    architecture the tool writes, and a tied head, which has no tensor of its own.
    """
    kept = [
        name.removesuffix(".weight")
        for name in weights.plain
        if name.endswith(".weight")
        and len(weights.checkpoint.tensors[name].shape) == 2
        and "embed" not in name
    ]
    return kept if f"{_HEAD}.weight" in weights.names else [*kept, _HEAD]


def _fused(module: str, checkpoint: Checkpoint) -> str | None:
    """The engines' merged module; without a spec to say so, any module may become a part of one."""
    model_type = checkpoint.config.get("model_type")
    if path := specs.beside(checkpoint.folder, model_type):
        return specs.load(str(model_type), path).fused_module(module)
    return module


def _job(name: str, weights: StoredWeights, layout: Layout) -> Job:
    module = name.removesuffix(".weight")
    tensors = weights.checkpoint.tensors
    shape = weights.quantized.get(module)
    if shape is None:
        info = tensors[name]
        output = Output(name, info.dtype, info.shape)
        return Job("kept", (Member(name, info, info.shape, "copy", "kept", (), (output,)),))
    assert weights.layout is not None
    codes = weights.layout.outputs(module, shape, False)[0].name
    outputs = layout.outputs(module, shape, weights.activations)
    fused = _fused(module, weights.checkpoint)
    member = Member(name, tensors[codes], shape, "repack", "NVFP4", (), outputs, fused)
    return Job("weights", (member,))


def _origin(folder: Path) -> dict[str, Any]:
    """What the checkpoint's own record says of its making, or the defaults for other tools'."""
    unknown = {"recipe": Recipe(), "model": str(folder.name),
               "rotation": {"kind": "unknown", "seed": None, "sizes": {}}}  # fmt: skip
    path = folder / RECORD
    if not path.is_file():
        return unknown
    recipe = load(str(path))  # refuses what is no YAML mapping
    record = yaml.safe_load(path.read_text(encoding="utf-8"))
    if missing := [key for key in unknown if key not in record]:
        raise CheckpointError(
            f"{path} does not say the {missing[0]} of the run that wrote it: restore or delete it."
        )
    return {**record, "recipe": recipe}
