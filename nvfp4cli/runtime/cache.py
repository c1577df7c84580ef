"""Keys and values as they enter the cache, seen or rounded on their way."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nvfp4cli import kernels
from nvfp4cli.formats import fp8

# What modules call their cache, in the order of the releases of transformers.
_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


def parameter(forward: Callable[..., Any]) -> str:
    """The name of a forward function's parameter that takes a cache."""
    known = inspect.signature(forward).parameters
    return next(name for name in _NAMES if name in known)


class Observed(DynamicCache):
    """A cache that keeps nothing but the largest magnitudes; use it for whole sequences only.

    Every attention of transformers hands its keys, with their positions, and its values to the
    cache, whatever computes with them then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys_amax: Tensor | None = None
        self.values_amax: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """[B, heads, T, d] each; returned as they are."""
        self.keys_amax = larger(self.keys_amax, key_states)
        self.values_amax = larger(self.values_amax, value_states)
        return key_states, value_states


class _Rounded(DynamicCache):
    """A cache that rounds under fixed scales and keeps nothing.

    scales: of keys and values by the number of the layer.
    """

    def __init__(self, scales: dict[int, tuple[float, float]]) -> None:
        super().__init__()
        self._scales = scales

    def round(self, x: Tensor, scale: float) -> Tensor:
        """[B, heads, T, d], as it is read back."""
        raise NotImplementedError

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *arguments: Any,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor]:
        """[B, heads, T, d] each; returned as attention reads them back."""
        if layer_idx not in self._scales:
            return key_states, value_states
        key, value = self._scales[layer_idx]
        return self.round(key_states, key), self.round(value_states, value)


class Fp8(_Rounded):
    """E4M3 under the multipliers amax / 448."""

    def round(self, x: Tensor, scale: float) -> Tensor:
        """[B, heads, T, d], as it is read back."""
        return fp8.rounded(x, scale)


class Nvfp4(_Rounded):
    """NVFP4 in blocks of 16 channels of a head, under the global scales amax / 2688."""

    def round(self, x: Tensor, scale: float) -> Tensor:
        """[B, heads, T, d], as it is read back; d a multiple of 16."""
        multiplier = torch.tensor([scale], device=x.device)
        return kernels.quantize_dequantize(x.reshape(-1, x.shape[-1]), multiplier).view(x.shape)


def larger(amax: Tensor | None, x: Tensor) -> Tensor:
    """The largest magnitude so far, None at first; x: not empty."""
    found = x.abs().amax()
    return found if amax is None else torch.maximum(amax, found)
