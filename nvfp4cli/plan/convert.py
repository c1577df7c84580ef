"""The plan of `nvfp4 convert`: the same codes and block scales in another layout."""

import re
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nvfp4cli.checkpoint.files import CHANNELS, RECORD
from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.formats.nvfp4 import BLOCK
from nvfp4cli.layouts import LAYOUTS, StoredWeights, branch, open_weights
from nvfp4cli.layouts.declared import caches
from nvfp4cli.layouts.record import Layout
from nvfp4cli.layouts.sources import Source, SourceTensor
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import check_complete, fused_module, recognize
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.plan import advice, selection, shapes
from nvfp4cli.plan.assemble import assemble
from nvfp4cli.plan.record import Facts, Job, Member, Plan
from nvfp4cli.recipe import Recipe, load
from nvfp4cli.rotate.channels import from_bytes

_HEAD = "lm_head"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_WEIGHT = ".weight"
_HISTORY = ("budget", "calibration")  # entries of the record that hold in every layout
# Endings of the tensors that a layout stores for a quantised weight.
_PART_SUFFIXES = {
    part.name
    for layout in LAYOUTS.values()
    for part in layout.outputs("", (BLOCK, BLOCK), layout.INPUT_SCALES)
} - {_WEIGHT}


def plan_convert(checkpoint: Checkpoint, layout_name: str, max_shard_size: str | None) -> Plan:
    """Decide how every tensor of an NVFP4 checkpoint is repacked.

    Raises UnsupportedError where the checkpoint holds no NVFP4 weights, or something that the
    other layout cannot hold; CheckpointError where it is incomplete or contradicts its config.json.
    """
    weights = open_weights(checkpoint)
    layout = LAYOUTS[layout_name]
    if weights.layout is None:
        raise UnsupportedError(
            f"{checkpoint.folder} holds no NVFP4 weights: quantise it first with `nvfp4 quantize`."
        )
    _check_representable(weights, layout)
    _check_parts(weights)
    spec = _spec(checkpoint)
    if spec is not None:
        _check_model(weights, spec)
    origin = _origin(checkpoint.folder)
    recipe = origin["recipe"].merged(layout=layout_name, max_shard_size=max_shard_size)
    source = _as_stored(checkpoint)
    jobs = [_job(name, source, weights, layout, spec) for name in weights.names]
    jobs += [_cache_job(attention, source, weights, layout) for attention in weights.caches]

    def place(job: Job) -> tuple[str, int]:
        info = checkpoint.tensors[job.members[0].source.parts[0]]
        return info.file, info.start

    jobs.sort(key=place)  # reading goes through the files from front to back
    rank = max(weights.ranks.values(), default=None)
    facts = Facts(
        model=origin["model"],
        rotation=origin["rotation"],
        kept=tuple(_kept(weights) if spec is None else _kept_of(weights, spec)),
        presets={},
        copies=(),
        untied=False,
        without_mtp=False,
        activations=weights.activations or weights.dynamic,
        caches=_caches(weights),
        rank=rank,
        warnings=tuple(advice.warnings(jobs, layout)),
        next_step=advice.next_step(jobs, layout, rank),
        spec_text="",
        own_spec=True,
        channels=_channels(checkpoint.folder),
        history={key: origin[key] for key in _HISTORY if key in origin},
    )
    return assemble(source, spec, recipe, layout, jobs, facts)


def _check_representable(weights: StoredWeights, layout: Layout) -> None:
    _check_fp8(weights, layout)
    _check_caches(weights, layout)
    if weights.ranks and not layout.BRANCHES:
        raise UnsupportedError(
            f"{min(weights.ranks)} has a low-rank branch of SVDQuant, which the {layout.NAME} "
            "layout cannot hold: quantise the source model again with another method."
        )
    experts = [module for module in weights.quantized if _EXPERT.search(module)]
    if experts and layout.NAME in selection.WITHOUT_EXPERTS:
        raise UnsupportedError(
            f"No engine reads experts such as {experts[0]} in the {layout.NAME} layout: use "
            "--layout compressed-tensors or modelopt."
        )
    if weights.dynamic and layout is not weights.layout:
        raise UnsupportedError(
            "The activations of this checkpoint are quantised under dynamic scales, which the "
            f"{layout.NAME} layout cannot express: quantise the source model with --scheme w4a4 "
            f"--layout {layout.NAME}."
        )
    if weights.activations and not layout.INPUT_SCALES:
        holders = ", ".join(name for name, other in LAYOUTS.items() if other.INPUT_SCALES)
        raise UnsupportedError(
            f"The {layout.NAME} layout cannot hold the static input scales of this checkpoint: "
            f"choose one of {holders}."
        )


def _check_fp8(weights: StoredWeights, layout: Layout) -> None:
    """Raise for modules in FP8 of a kind that the layout does not hold beside these in NVFP4."""
    if not weights.fp8:
        return
    scheme = "w4a4" if weights.activations else "w4a16"
    tensors = weights.checkpoint.tensors
    for module, input_scale in weights.fp8.items():
        whole = tensors[f"{module}.weight_scale"].numel == 1
        alike = (input_scale is not None) == weights.activations
        if scheme not in layout.FP8_SCHEMES or not whole or not alike:
            raise UnsupportedError(
                f"{module} is in FP8 in a way that the {layout.NAME} layout of this tool does not "
                "hold: quantise the source model with --bits in the layout you need."
            )


def _check_caches(weights: StoredWeights, layout: Layout) -> None:
    """Raise UnsupportedError unless the KV cache is one that the layout describes, or none is."""
    checkpoint = weights.checkpoint
    if queries := [name for name in weights.plain if name.endswith(".q_scale")]:
        raise UnsupportedError(
            f"{queries[0]} scales the queries of attention, which `convert` does not carry over: "
            "quantise the source model again in the layout you need."
        )
    if _caches(weights):
        layout.cache_outputs("")  # refuses where there is no place for them
    known = {form.upper() for form in layout.CACHES}
    if others := sorted(caches(checkpoint) - known):
        raise UnsupportedError(
            f"The KV cache is declared as {others[0]}, and `convert` carries over into this layout "
            f"static {' or '.join(sorted(known))} only: quantise the source model again in the "
            "layout you need."
        )
    for attention in weights.caches:
        weights.cache_scales(attention)


def _caches(weights: StoredWeights) -> str | None:
    """The format of KV caches, also without scales: engines take 1 then."""
    found = sorted(caches(weights.checkpoint))
    return found[0].lower() if found else "fp8" if weights.caches else None


def _check_parts(weights: StoredWeights) -> None:
    """Raise CheckpointError for a weight that lacks a part, or is quantised in another way.

    The first kind without its global scale, and the second, show as parts that no NVFP4 weight
    owns; they would be copied as if they were weights of their own.
    """
    tensors = weights.checkpoint.tensors
    for module in weights.quantized:
        weights.check_parts(module, weights.activations)
    for name in weights.plain:
        if name.endswith(branch.HALVES):
            raise CheckpointError(
                f"{tensors[name].file} holds {name} beside no NVFP4 weight of its layout: quantise "
                "the source again."
            )
        suffix = next((s for s in _PART_SUFFIXES if name.endswith(s)), None)
        if suffix is None and name.endswith(_WEIGHT) and tensors[name].dtype == torch.uint8:
            suffix = _WEIGHT
        if suffix is not None:
            assert weights.layout is not None
            parts = weights.layout.outputs(name.removesuffix(suffix), (BLOCK, BLOCK), False)
            missing = [part.name for part in parts if part.name not in tensors]
            raise CheckpointError(
                f"{tensors[name].file} holds {name} without {missing[0]}, so that its weight is "
                "incomplete or not in NVFP4: quantise the source again."
            )


def _check_model(weights: StoredWeights, spec: ArchSpec) -> None:
    """Raise where a tensor of the model is missing or has another shape than config.json says.

    Tensors that the architecture does not have are copied.
    """
    config = spec.language(weights.checkpoint.config)
    sizes = shapes.sizes(spec, config)
    check_complete(spec, weights.names, config)
    claims, _ = recognize(spec, weights.names)
    found = {name: tensor.shape for name, tensor in weights.checkpoint.tensors.items()}
    found |= {module + _WEIGHT: shape for module, shape in weights.quantized.items()}
    shapes.check(claims.values(), found, sizes, spec.experts)


def _kept_of(weights: StoredWeights, spec: ArchSpec) -> list[str]:
    """Linear modules that stay in the source dtype."""
    claims, others = recognize(spec, weights.names)
    shapes_of = {name: tensor.shape for name, tensor in weights.checkpoint.tensors.items()}
    quantized = {module + _WEIGHT for module in (*weights.quantized, *weights.fp8)}
    found = list(selection.kept(claims, shapes_of, quantized, spec))
    # What the architecture does not have is copied, and engines may build a module for it.
    found += [n.removesuffix(_WEIGHT) for n in others if n.endswith(_WEIGHT) and n not in quantized]
    return found


def _kept(weights: StoredWeights) -> list[str]:
    """Modules that an engine could take for linear ones to be quantised.

    Those of two-dimensional weights except embeddings, which have an embedding's name in every
    architecture the tool writes, and a tied head, which has no tensor of its own.
    """
    kept = [
        name.removesuffix(_WEIGHT)
        for name in weights.plain
        if name.endswith(_WEIGHT)
        and len(weights.checkpoint.tensors[name].shape) == 2
        and "embed" not in name
    ]
    return kept if _HEAD + _WEIGHT in weights.names else [*kept, _HEAD]


def _spec(checkpoint: Checkpoint) -> ArchSpec | None:
    """The spec stored beside the checkpoint or the tool's own, if any."""
    model_type = checkpoint.config.get("model_type")
    path = specs.beside(checkpoint.folder, model_type)
    names = open_weights(checkpoint).names
    return specs.load_for(checkpoint.config, names, path) if path else None


def _always_finite(name: str, spec: ArchSpec | None) -> bool:
    """True for a parameter that quantising would have refused with a NaN or Inf in it.

    A linear weight in a source dtype may have been ignored because it is damaged.
    """
    claim = recognize(spec, [name])[0].get(name) if spec else None
    return claim is not None and (claim.part == "bias" or not claim.spec.quantizable)


def _as_stored(checkpoint: Checkpoint) -> Source:
    """Every tensor under its own name."""
    tensors = {
        name: SourceTensor(name, info.dtype, info.shape, info.nbytes, (name,), None)
        for name, info in checkpoint.tensors.items()
    }
    return Source(checkpoint, tensors, (), None, ())


def _job(
    name: str, source: Source, weights: StoredWeights, layout: Layout, spec: ArchSpec | None
) -> Job:
    module = name.removesuffix(_WEIGHT)
    tensors = source.tensors
    if module in weights.fp8:
        n, k = tensors[name].shape
        outputs = layout.fp8_outputs(module, (n, k), weights.activations)
        return Job(
            "weights",
            (Member(name, module, tensors[name], (n, k), "repack_fp8", "FP8", (), outputs),),
        )
    shape = weights.quantized.get(module)
    if shape is None:
        info = tensors[name]
        output = Output(name, info.dtype, info.shape)
        member = Member(
            name, module, info, info.shape, "copy", "kept", (), (output,),
            finite=_always_finite(name, spec),
        )  # fmt: skip
        return Job("kept", (member,))
    assert weights.layout is not None
    codes = weights.layout.outputs(module, shape, False)[0].name
    outputs = layout.outputs(module, shape, weights.activations)
    if module in weights.ranks:
        outputs += branch.outputs(module, shape, weights.ranks[module])
    # Without a spec to say so, any module may become a part of a merged one.
    fused = fused_module(spec, module) if spec else module
    member = Member(name, module, tensors[codes], shape, "repack", "NVFP4", (), outputs, fused)
    return Job("weights", (member,))


def _channels(folder: Path) -> dict[str, Tensor] | None:
    """The factors that stand beside a checkpoint whose channels were scaled."""
    path = folder / CHANNELS
    return from_bytes(path.read_bytes(), str(path)) if path.is_file() else None


def _cache_job(attention: str, source: Source, weights: StoredWeights, layout: Layout) -> Job:
    """The two scales, of which the keys' stands for both."""
    name = weights.caches[attention]["k"]
    outputs = layout.cache_outputs(attention)
    member = Member(name, attention, source.tensors[name], (), "recache", "KV cache", (), outputs)
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
