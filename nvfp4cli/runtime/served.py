"""A written checkpoint as it is served: with the activations that it declares."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import UnsupportedError, WeightError
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.layouts import StoredWeights, open_weights
from nvfp4cli.models import spec as specs
from nvfp4cli.runtime import activations
from nvfp4cli.runtime.cache import Fp8, parameter
from nvfp4cli.runtime.linears import Linears, Site
from nvfp4cli.runtime.matrices import Matrix, of_model, placed
from nvfp4cli.runtime.model import load

# none: activations stay as they are computed. four-over-six: see `activations.Rule`.
Activations = Literal["declared", "none", "four-over-six"]


class Served:
    """A causal language model whose linear layers round their inputs, and whose cache its contents.

    Called as transformers' model is. rounding: of inputs, by the name of the site. caches: scales
    of keys and values by the number of the layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: list[Site],
        rounding: dict[str, Callable[[Tensor], Tensor]],
        caches: dict[int, tuple[float, float]],
    ) -> None:
        self._model, self._sites, self._rounding, self._caches = model, sites, rounding, caches

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
            arguments[parameter(self._model.forward)] = Fp8(self._caches)
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
    if mode == "none" or not (weights.activations or caches):
        return model
    sites: list[Site] = []
    rounding: dict[str, Callable[[Tensor], Tensor]] = {}
    if weights.activations:
        rule: activations.Rule = "four-over-six" if mode == "four-over-six" else "amax"
        for site, scale in _scales(weights, model):
            sites.append(site)
            rounding[site.name] = activations.static(scale, rule)
    return Served(model, sites, rounding, caches)


def served(folder: Path, mode: Activations) -> str:
    """What `serve` rounds of a checkpoint, for people."""
    weights = open_weights(open_checkpoint(folder))
    found = []
    if mode != "none" and weights.activations:
        four = ", four-over-six" if mode == "four-over-six" else ""
        spared = ", not those of low-rank branches" if weights.ranks else ""
        found.append(f"inputs of linear layers to NVFP4 under static scales{four}{spared}")
    if mode != "none" and cache_scales(weights):
        found.append("keys and values to FP8")
    return " and ".join(found) or "none"


def cache_scales(weights: StoredWeights) -> dict[int, tuple[float, float]]:
    """Scales of keys and values by the number of the layer; none of a layer that lacks one.

    Raises WeightError where one is no usable number.
    """
    found: dict[int, dict[str, float]] = {}
    for name in weights.auxiliary:
        if match := _CACHE_SCALE.search(name):
            value = weights.checkpoint.read(name).item()
            if not 0 < value < math.inf:
                raise WeightError(
                    f"{name} is {value}, and a scale must be positive: quantise the source again."
                )
            found.setdefault(int(match[1]), {})[match[2]] = value
    return {layer: (one["k"], one["v"]) for layer, one in found.items() if len(one) == 2}


_CACHE_SCALE = re.compile(r"\.(\d+)\..*\.([kv])_scale$")


def _scales(weights: StoredWeights, model: PreTrainedModel) -> Iterator[tuple[Site, GlobalScale]]:
    """Where a model multiplies by quantised weights, and the input scale there.

    Low-rank branches are held beside the weights in the form of these, not as two thin matrices.
    """
    checkpoint = weights.checkpoint
    path = specs.beside(checkpoint.folder, checkpoint.config.get("model_type"))
    if path is None:
        raise UnsupportedError(
            f"The architecture of {checkpoint.folder} is not known, so that its activations cannot "
            "be rounded: measure the weights alone with --activations none."
        )
    spec = specs.load_for(checkpoint.config, weights.names, path)
    together: dict[int, list[Matrix]] = {}
    for one in of_model(spec, weights.quantized, model).values():
        together.setdefault(one.operand.data_ptr(), []).append(one)
    for own in together.values():
        # Matrices with one operand have one input, and engines take the larger scale of them.
        scales = (weights.input_scale(one.name) for one in own)
        scale = max(scales, key=lambda scale: scale.multiplier)
        branched = [one for one in own if one.name in weights.ranks]
        branch = placed((one, weights.branch(one.name).product()) for one in branched)
        yield Site(own[0].name, own[0].operand, branch), scale
