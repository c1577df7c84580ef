"""A written checkpoint as it is served: with the activations that it declares."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.formats.nvfp4 import GlobalScale
from nvfp4cli.layouts import StoredWeights, open_weights
from nvfp4cli.models import spec as specs
from nvfp4cli.runtime import activations
from nvfp4cli.runtime.cache import Fp8, parameter
from nvfp4cli.runtime.linears import Linears, Site
from nvfp4cli.runtime.matrices import of_model
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
    rounds = weights.activations or weights.dynamic
    if mode == "none" or not (rounds or caches):
        return model
    sites: list[Site] = []
    rounding: dict[str, Callable[[Tensor], Tensor]] = {}
    if rounds:
        rule: activations.Rule = "four-over-six" if mode == "four-over-six" else "amax"
        for site, scale in _scales(weights, model):
            sites.append(site)
            rounding[site.name] = (
                activations.static(scale, rule) if scale else activations.dynamic(rule)
            )
    return Served(model, sites, rounding, caches)


def served(folder: Path, mode: Activations) -> str:
    """What `serve` rounds of a checkpoint, for people."""
    weights = open_weights(open_checkpoint(folder))
    found = []
    if mode != "none" and (weights.activations or weights.dynamic):
        four = ", four-over-six" if mode == "four-over-six" else ""
        kind = "dynamic" if weights.dynamic else "static"
        found.append(f"inputs of linear layers to NVFP4 under {kind} scales{four}")
    if mode != "none" and cache_scales(weights):
        found.append("keys and values to FP8")
    return " and ".join(found) or "none"


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


def _scales(
    weights: StoredWeights, model: PreTrainedModel
) -> Iterable[tuple[Site, GlobalScale | None]]:
    """Where a model multiplies by quantised weights, and the input scale there, None if dynamic."""
    checkpoint = weights.checkpoint
    path = specs.beside(checkpoint.folder, checkpoint.config.get("model_type"))
    if path is None:
        raise UnsupportedError(
            f"The architecture of {checkpoint.folder} is not known, so that its activations cannot "
            "be rounded: measure the weights alone with --activations none."
        )
    spec = specs.load_for(checkpoint.config, weights.names, path)
    operands = of_model(spec, weights.quantized, model)
    if weights.dynamic:
        places = {one.operand.data_ptr(): Site(n, one.operand) for n, one in operands.items()}
        return [(site, None) for site in places.values()]
    found: dict[int, tuple[Site, GlobalScale]] = {}
    for name, one in operands.items():
        scale, place = weights.input_scale(name), one.operand.data_ptr()
        # Matrices with one operand have one input, and engines take the larger scale of them.
        if place not in found or found[place][1].multiplier < scale.multiplier:
            found[place] = Site(name, one.operand), scale
    return found.values()
