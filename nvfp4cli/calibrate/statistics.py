"""What calibration leaves for later runs: a safetensors file of a few numbers for each layer."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nvfp4cli.errors import CheckpointError

_KEY = "nvfp4_statistics"
_AMAX, _SQUARE, _TOKENS = ".input_amax", ".input_mean_square", ".input_tokens"
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_KEYS, _VALUES = ".key_amax", ".value_amax"


def across_experts(module: str) -> str:
    """The name of a module, the same for every expert of its layer."""
    return _EXPERT.sub("*", module)


@dataclass(frozen=True)
class Inputs:
    """Of a linear module. amax: largest magnitude. mean_square: of each channel, fp32 [K]."""

    amax: float
    mean_square: Tensor
    tokens: int


@dataclass(frozen=True)
class Statistics:
    """inputs: by module, under the names that quantised modules are written as. keys, values:
    largest magnitudes as they enter the cache, by attention module. facts: how they were made.
    """

    facts: dict[str, Any]
    inputs: dict[str, Inputs] = field(default_factory=dict)
    keys: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)

    def of(self, modules: Sequence[str]) -> Inputs:
        """Of modules that have one input: the largest magnitude of all, the rest of the first.

        All experts of a layer have the largest magnitude of theirs: engines know one for a layer.
        Raises CheckpointError for one that the statistics know nothing of.
        """
        if unknown := [module for module in modules if module not in self.inputs]:
            raise CheckpointError(
                f"The statistics know nothing of the inputs of {unknown[0]}: calibrate again with "
                "the same --ignore and --include."
            )
        amax = max(self._largest[across_experts(module)] for module in modules)
        return replace(self.inputs[modules[0]], amax=amax)

    @cached_property
    def _largest(self) -> dict[str, float]:
        """By the name of a module across experts; to be asked for once all inputs are known."""
        found: dict[str, float] = {}
        for module, one in self.inputs.items():
            name = across_experts(module)
            found[name] = max(found.get(name, 0.0), one.amax)
        return found

    def save(self, path: Path) -> None:
        """Write the file; it appears under its name once it is whole."""
        tensors: dict[str, Tensor] = {}
        for module, one in self.inputs.items():
            tensors[module + _AMAX] = torch.tensor(one.amax)
            tensors[module + _SQUARE] = one.mean_square.to("cpu", torch.float32).clone()
            tensors[module + _TOKENS] = torch.tensor(one.tokens)
        for suffix, found in ((_KEYS, self.keys), (_VALUES, self.values)):
            tensors |= {name + suffix: torch.tensor(amax) for name, amax in found.items()}
        partial = path.with_name(path.name + ".partial")
        save_file(tensors, partial, metadata={_KEY: json.dumps(self.facts, sort_keys=True)})
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        """Raises CheckpointError for a file that is none of statistics, or is damaged."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})[_KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path} holds no statistics ({' '.join(str(error).split())}): name a file that "
                "`nvfp4 calibrate` wrote."
            ) from None

        def scalars(suffix: str) -> dict[str, float]:
            return {
                name.removesuffix(suffix): tensor.item()
                for name, tensor in tensors.items()
                if name.endswith(suffix)
            }

        amax, tokens = scalars(_AMAX), scalars(_TOKENS)
        for name, value in {**amax, **scalars(_KEYS), **scalars(_VALUES)}.items():
            if not (math.isfinite(value) and value >= 0):
                raise CheckpointError(
                    f"{path} gives {name} a largest magnitude of {value}: calibrate again."
                )
        inputs = {
            module: Inputs(value, tensors[module + _SQUARE], int(tokens[module]))
            for module, value in amax.items()
        }
        return cls(facts, inputs, scalars(_KEYS), scalars(_VALUES))
