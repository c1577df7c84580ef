"""What a twin is given to read: random tokens and, where the model sees, a random picture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nvfp4cli.check.precision import float64
from nvfp4cli.check.shrink import ORDINARY

TOKENS = 24

_Pixels = Callable[..., Tensor]  # (*shape) -> fp64 values


def _square(vision: PreTrainedConfig, pixels: _Pixels) -> dict[str, Any]:
    side = vision.image_size
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return {"pixel_values": pixels(1, vision.num_channels, height, width)}


def _sized(vision: PreTrainedConfig, pixels: _Pixels) -> dict[str, Any]:
    return _square(vision, pixels) | {"image_sizes": [[vision.image_size, vision.image_size]]}


def _tiled(vision: PreTrainedConfig, pixels: _Pixels) -> dict[str, Any]:
    side = vision.image_size
    tiles = pixels(1, 3, vision.num_channels, side, side)  # the whole, and each of its halves
    return {"pixel_values": tiles, "image_sizes": torch.tensor([[side, 2 * side]])}


def _grid(vision: PreTrainedConfig, pixels: _Pixels) -> dict[str, Any]:
    side = 2 * vision.spatial_merge_size
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, side, side]])
    return {"pixel_values": pixels(side * side, patch), "image_grid_thw": grid}


@dataclass(frozen=True)
class _Sight:
    """How a wrapper takes pictures. kinds: the argument that marks their tokens, if it has one."""

    picture: Callable[[PreTrainedConfig, _Pixels], dict[str, Any]]
    kinds: str | None = None


_SIGHTS = {
    "llava": _Sight(_square),
    "internvl": _Sight(_square),
    "gemma3": _Sight(_square, "token_type_ids"),
    "mistral3": _Sight(_sized),
    "llava_next": _Sight(_tiled),
    "qwen2_vl": _Sight(_grid, "mm_token_type_ids"),
    "qwen2_5_vl": _Sight(_grid, "mm_token_type_ids"),
    "qwen3_vl": _Sight(_grid, "mm_token_type_ids"),
    "qwen3_5": _Sight(_grid, "mm_token_type_ids"),
    "qwen3_5_moe": _Sight(_grid, "mm_token_type_ids"),
}


def sighted(config: PreTrainedConfig) -> bool | None:
    """Whether `inputs` shows the model a picture; None where it has no vision tower."""
    if getattr(config, "vision_config", None) is None:
        return None
    return config.model_type in _SIGHTS


def inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Any]:
    """The arguments of a forward pass of a twin, the same for the same seed.

    A picture stands between two halves of the text.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ORDINARY, (1, TOKENS), generator=generator)
    config = model.config
    if not sighted(config):
        return {"input_ids": ids}

    def pixels(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sight = _SIGHTS[config.model_type]
    shown = sight.picture(config.vision_config, pixels)
    mark = torch.full((1, _tokens_of(model, shown)), config.image_token_id)
    ids = torch.cat([ids[:, : TOKENS // 2], mark, ids[:, TOKENS // 2 :]], dim=1)
    given = {"input_ids": ids, **shown}
    if sight.kinds:
        given[sight.kinds] = (ids == config.image_token_id).int()
    return given


def _tokens_of(model: PreTrainedModel, shown: dict[str, Any]) -> int:
    """How many tokens stand for a picture."""
    with float64():
        found = model.model.get_image_features(**shown, return_dict=True).pooler_output
    features = found if isinstance(found, list | tuple) else [found]
    return sum(feature.numel() // feature.shape[-1] for feature in features)
