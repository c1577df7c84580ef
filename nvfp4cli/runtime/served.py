"""A written checkpoint as it is served: with the activations that it declares."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.layouts import StoredWeights, open_weights
from nvfp4cli.layouts.declared import caches as declared_caches
from nvfp4cli.models import spec as specs
from nvfp4cli.runtime import activations
from nvfp4cli.runtime.cache import Fp8, Nvfp4, parameter
from nvfp4cli.runtime.linears import Linears, Site
from nvfp4cli.runtime.matrices import Matrix, of_model, placed
from nvfp4cli.runtime.model import load

# none: activations stay as they are computed. four-over-six: see `activations.Rule`.
Activations = Literal["declared", "none", "four-over-six"]


class Served:
    """A causal language model whose linear layers round their inputs, and whose cache its contents.

    Called as transformers' model is. rounding: of inputs, by the name of the site. caches: scales
    of keys and values by the number of the layer. cache: what rounds under them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: list[Site],
        rounding: dict[str, Callable[[Tensor], Tensor]],
        caches: dict[int, tuple[float, float]],
        cache: type[Fp8 | Nvfp4] = Fp8,
    ) -> None:
        self._model, self._sites, self._rounding, self._caches = model, sites, rounding, caches
        self._cache = cache

    @property
    def config(self) -> PreTrainedConfig:
        """Of the model."""
        config: PreTrainedConfig = self._model.config
        return config

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._model.device

    def __call__(self, **arguments: Any) -> Any:
        def given(site: Site, x: Tensor) -> Tensor:
            return self._rounding[site.name](x)

        if self._caches:
            arguments[parameter(self._model.forward)] = self._cache(self._caches)
        with Linears(self._sites, given):
            return self._model(**arguments)


def serve(
    folder: Path, mode: Activations, *, dtype: torch.dtype, device: str
) -> PreTrainedModel | Served:
    """The model of a checkpoint with its activations and its cache rounded as `mode` says.

    Raises what `model.load` and `as_served` raise.
    """
    return as_served(load(folder, dtype=dtype, device=device), folder, mode)


def as_served(model: PreTrainedModel, folder: Path, mode: Activations) -> PreTrainedModel | Served:
    """A model that was loaded from a checkpoint, rounding what the checkpoint declares.

    Raises UnsupportedError where the architecture is not known, so that it cannot be said which
    product a weight belongs to.
    """
    weights = open_weights(open_checkpoint(folder))
    caches = cache_scales(weights)
    if mode == "none" or not (_in_nvfp4(weights) or _in_fp8(weights) or weights.dynamic or caches):
        return model
    sites: list[Site] = []
    rounding: dict[str, Callable[[Tensor], Tensor]] = {}
    rule: activations.Rule = "four-over-six" if mode == "four-over-six" else "amax"
    for site, multiplier in _largest(weights, model, _in_nvfp4(weights)):
        sites.append(site)
        rounding[site.name] = activations.static(GlobalScale.from_multiplier(multiplier), rule)
    for site, multiplier in _largest(weights, model, _in_fp8(weights)):
        sites.append(site)
        rounding[site.name] = activations.static_fp8(multiplier)
    for site, _ in _largest(weights, model, _dynamic(weights)):
        sites.append(site)
        rounding[site.name] = activations.dynamic(rule)
    return Served(model, sites, rounding, caches, _cache(weights))


def served(folder: Path, mode: Activations) -> str:
    """What `serve` rounds of a checkpoint, for people."""
    weights = open_weights(open_checkpoint(folder))
    found = []
    if mode != "none" and (_in_nvfp4(weights) or weights.dynamic):
        four = ", four-over-six" if mode == "four-over-six" else ""
        kind = "dynamic" if weights.dynamic else "static"
        spared = ", not those of low-rank branches" if weights.ranks else ""
        found.append(f"inputs of linear layers to NVFP4 under {kind} scales{four}{spared}")
    if mode != "none" and _in_fp8(weights):
        found.append("inputs of linear layers in FP8 to FP8 under static scales")
    if mode != "none" and cache_scales(weights):
        found.append(f"keys and values to {'NVFP4' if _cache(weights) is Nvfp4 else 'FP8'}")
    return " and ".join(found) or "none"


def _cache(weights: StoredWeights) -> type[Fp8 | Nvfp4]:
    return Nvfp4 if "NVFP4" in declared_caches(weights.checkpoint) else Fp8


def cache_scales(weights: StoredWeights) -> dict[int, tuple[float, float]]:
    """Scales of keys and values by the number of the layer; none of a layer that lacks one.

    Raises what `StoredWeights.cache_scales` raises.
    """
    found = {}
    for attention, names in weights.caches.items():
        number = re.search(r"\.(\d+)\.", attention)
        if number and len(names) == 2:
            scales = weights.cache_scales(attention)
            found[int(number[1])] = scales.key, scales.value
    return found


def _in_nvfp4(weights: StoredWeights) -> dict[str, float]:
    """Modules whose inputs are rounded to NVFP4 -> the multiplier of the static scale."""
    if not weights.activations:
        return {}
    return {name: weights.input_scale(name).multiplier for name in weights.quantized}


def _dynamic(weights: StoredWeights) -> dict[str, float]:
    """Modules whose inputs are rounded to NVFP4 under scales of their own; any number."""
    return dict.fromkeys(weights.quantized if weights.dynamic else (), 0.0)


def _in_fp8(weights: StoredWeights) -> dict[str, float]:
    """Modules whose inputs are rounded to FP8 -> the static scale."""
    found = {name: weights.fp8_input_scale(name) for name in weights.fp8}
    return {name: scale for name, scale in found.items() if scale is not None}


def _largest(
    weights: StoredWeights, model: PreTrainedModel, scales: Mapping[str, float]
) -> Iterator[tuple[Site, float]]:
    """Where a model multiplies by these modules, and the input scale there.

    Low-rank branches are held beside the weights in the form of these, not as two thin matrices.
    """
    if not scales:
        return
    checkpoint = weights.checkpoint
    path = specs.beside(checkpoint.folder, checkpoint.config.get("model_type"))
    if path is None:
        raise UnsupportedError(
            f"The architecture of {checkpoint.folder} is not known, so that its activations cannot "
            "be rounded: measure the weights alone with --activations none."
        )
    spec = specs.load_for(checkpoint.config, weights.names, path)
    together: dict[int, list[Matrix]] = {}
    for one in of_model(spec, scales, model).values():
        together.setdefault(one.operand.data_ptr(), []).append(one)
    for own in together.values():
        branched = [one for one in own if one.name in weights.ranks]
        branch = placed((one, weights.branch(one.name).product()) for one in branched)
        # Matrices with one operand have one input, and engines take the larger scale of them.
        yield Site(own[0].name, own[0].operand, branch), max(scales[one.name] for one in own)
