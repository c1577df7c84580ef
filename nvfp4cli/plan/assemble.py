"""From jobs to a finished plan: shards, configuration files, the record of the run."""

import copy
import json
from functools import reduce
from typing import Any

import torch
import yaml

from nvfp4cli import __version__
from nvfp4cli.checkpoint.files import CHANNELS, RECORD
from nvfp4cli.checkpoint.writer import make_shards
from nvfp4cli.layouts import open_weights
from nvfp4cli.layouts.record import Contents, Layout
from nvfp4cli.layouts.sources import Source
from nvfp4cli.models import spec as specs
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.plan.record import Facts, Job, Member, Plan
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import channels


def assemble(
    source: Source,
    spec: ArchSpec | None,
    recipe: Recipe,
    layout: Layout | None,
    jobs: list[Job],
    facts: Facts,
) -> Plan:
    """Deal the outputs into shards and compose every file that stands beside them."""
    weights, config = open_weights(source.checkpoint), source.checkpoint.config
    members = [member for job in jobs for member in job.members]
    quantized = [m.module for m in members if m.action in ("quantize", "repack")]
    fp8 = [m.module for m in members if m.action in ("fp8", "repack_fp8")]
    contents = Contents(quantized, facts.kept, facts.activations, facts.caches, fp8, facts.rank)

    dtype = _original_dtype(members, recipe, config)

    def metadata(numbers: list[int]) -> dict[str, str]:
        chosen = [members[i] for i in numbers]
        return _header_metadata(chosen, layout, dtype, facts.activations)

    limit = None if layout is not None and layout.SINGLE_FILE else recipe.max_shard_bytes
    shards = make_shards([m.outputs for m in members], limit, metadata)
    edited = _config(
        config, recipe, layout, contents, untied=facts.untied, without_mtp=facts.without_mtp
    )
    for *path, key in source.drop_config_keys:
        if key != "quantization_config" or path:
            reduce(dict.__getitem__, path, edited).pop(key, None)
    files = {"config.json": edited, **(layout.extra_files(contents) if layout else {})}
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in files.items()}
    record = {
        "nvfp4_version": __version__,
        "model": facts.model,
        "rotation": facts.rotation,
        "recipe": recipe.to_dict(),
    }
    if facts.budget is not None:
        record["budget"] = facts.budget.facts()
    record |= facts.history
    if not facts.own_spec:
        texts[specs.STORED] = facts.spec_text
    texts[RECORD] = yaml.safe_dump(record, sort_keys=False)
    binary = {} if facts.channels is None else {CHANNELS: channels.to_bytes(facts.channels)}
    return Plan(
        source, spec, weights, recipe, layout, tuple(jobs), tuple(shards), texts, facts, binary
    )


# How many layers predict further tokens, by the names that config.json gives it.
_MTP_COUNTS = {"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"}


def _header_metadata(
    members: list[Member], layout: Layout | None, dtype: torch.dtype, activations: bool
) -> dict[str, str]:
    if layout is None:
        return {}
    quantized = [m for m in members if m.action in ("quantize", "repack")]
    plain = [m.name for m in members if m.action in ("edit", "copy")]
    shapes = {m.module: (m.shape[0], m.shape[1]) for m in quantized}
    return layout.header_metadata(shapes, plain, dtype, activations)


def _original_dtype(members: list[Member], recipe: Recipe, config: dict[str, Any]) -> torch.dtype:
    """What the quantised weights dequantise to: the dtype that the model computes in."""
    if recipe.dtype != "source":
        name = recipe.dtype
    else:
        sources = {m.source.dtype for m in members if m.quantized}
        if len(sources) == 1:
            return sources.pop()
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _config(
    source: dict[str, Any],
    recipe: Recipe,
    layout: Layout | None,
    contents: Contents,
    *,
    untied: bool,
    without_mtp: bool = False,
) -> dict[str, Any]:
    """The source's config.json with the quantisation, and with what the run changed, stated."""
    config = copy.deepcopy(source)
    config.pop("quantization_config", None)
    levels = [config]
    if isinstance(config.get("text_config"), dict):
        levels.append(config["text_config"])
    for level in levels:
        if untied:
            # Which level wins depends on the model class, so both must say it.
            level["tie_word_embeddings"] = False
        if without_mtp:
            level.update(dict.fromkeys(_MTP_COUNTS & level.keys(), 0))
        if recipe.dtype != "source":
            keys = [key for key in ("dtype", "torch_dtype") if key in level] or ["dtype"]
            level.update(dict.fromkeys(keys, recipe.dtype))
    if layout is not None and (quantization := layout.quantization_config(contents)):
        config["quantization_config"] = quantization
    return config
