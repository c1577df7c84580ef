"""Which layers of a model its twin keeps: the fewest in which every kind of layer occurs."""

from collections.abc import Mapping, Sequence
from typing import Any

from nvfp4cli.errors import UnsupportedError

_COUNTS = ("num_hidden_layers", "n_layer")
# Lists of the numbers of layers that have a property.
_NUMBERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices")
_MOST = 4


def choose(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that speak of layers, for a model of a few of the layers.

    values: a complete configuration.
    """
    name = stated_as(_COUNTS, values)
    count = int(values[name])
    kept = _kept([_kinds(layer, count, values) for layer in range(count)])
    changes: dict[str, Any] = {name: len(kept)}
    for key, value in values.items():
        if key in _NUMBERS and isinstance(value, list):
            changes[key] = [new for new, old in enumerate(kept) if old in value]
        elif _each(value, count):
            changes[key] = [value[layer] for layer in kept]
    if dense := values.get("first_k_dense_replace"):
        changes["first_k_dense_replace"] = sum(layer < dense for layer in kept)
    if (step := values.get("decoder_sparse_step") or 1) > 1:
        only = values.get("mlp_only_layers") or []
        changes["decoder_sparse_step"] = 1
        changes["mlp_only_layers"] = [
            new for new, old in enumerate(kept) if old in only or (old + 1) % step
        ]
    return changes


def stated_as(names: Sequence[str], values: Mapping[str, Any]) -> str:
    """The first of `names` that a configuration gives a value. Raises UnsupportedError for none."""
    found = next((name for name in names if values.get(name)), None)
    if found is None:
        raise UnsupportedError(
            f"The configuration of a {values.get('model_type')} model says nothing of {names[0]}, "
            "and a twin is made from it: name a model with attention layers."
        )
    return found


def _each(value: Any, count: int) -> bool:
    """True for a list with an entry for each layer."""
    return isinstance(value, list) and len(value) == count


def _kinds(layer: int, count: int, values: Mapping[str, Any]) -> set[tuple[str, str]]:
    """What is said of a layer."""
    kinds = set()
    for key, value in values.items():
        if key in _NUMBERS and isinstance(value, list):
            kinds.add((key, str(layer in value)))
        elif _each(value, count):
            kinds.add((key, str(value[layer])))
    if dense := values.get("first_k_dense_replace"):
        kinds.add(("dense", str(layer < dense)))
    if step := values.get("decoder_sparse_step"):
        kinds.add(("sparse", str((layer + 1) % step == 0)))
    return kinds


def _kept(layers: list[set[tuple[str, str]]]) -> list[int]:
    """Numbers of the first layers that show something new, and of two at least."""
    seen: set[tuple[str, str]] = set()
    kept: list[int] = []
    for layer, kinds in enumerate(layers):
        if not kinds <= seen or not kept:
            kept.append(layer)
            seen |= kinds
    if len(kept) == 1 and len(layers) > 1:
        kept.append(len(layers) - 1)
    return kept[:_MOST]
