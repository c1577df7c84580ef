"""What predicts further tokens: layers behind num_hidden_layers, or a block of its own names."""

from collections.abc import Iterable, Mapping
from typing import Any

from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.models.modules import ModuleSpec, some
from nvfp4cli.models.spec import ArchSpec

_LAYER = "{layer}"


def behind(
    spec: ArchSpec, config: dict[str, Any], found: Mapping[str, tuple[ModuleSpec, int | None]]
) -> list[int]:
    """Numbers of the layers that predict further tokens and are counted on from the decoder's.

    found: the module and the layer of every tensor. A checkpoint may leave these layers out, as
    transformers does when it saves one. Raises UnsupportedError where the numbers, or the modules
    in these layers, are not what config.json says.
    """
    own = added(spec)
    if not own:
        return []
    layers = spec.sizes(config)["num_hidden_layers"]
    modules = {name: one for name, one in found.items() if one[1] is not None}
    early = [name for name, (m, n) in modules.items() if m in own and n is not None and n < layers]
    if early:
        raise UnsupportedError(
            f"num_hidden_layers is {layers} in config.json, and the checkpoint holds "
            f"{some(early)}, which only layers behind these have: correct config.json."
        )
    starts = {_start(module) for module in own}
    late = {n for m, n in modules.values() if n is not None and n >= layers and _start(m) in starts}
    numbers, count = sorted(late), _count(spec, config)
    if count is None:
        wanted = [module.pattern for module in own if not module.optional]
        shown = {(module.pattern, number) for module, number in modules.values()}
        return [n for n in numbers if all((pattern, n) in shown for pattern in wanted)]
    if numbers and numbers != list(range(layers, layers + count)):
        raise UnsupportedError(
            f"num_hidden_layers is {layers} and {spec.mtp_layers} is {count} in config.json, and "
            f"the checkpoint holds layer{'s' if len(numbers) > 1 else ''} "
            f"{some([str(n) for n in numbers])} behind the decoder's: correct config.json, or "
            "remove or complete these layers."
        )
    return numbers


def added(spec: ArchSpec) -> list[ModuleSpec]:
    """The modules that tell such a layer from one of the decoder's."""
    starts = {_start(module) for module in spec.modules if not module.mtp}
    return [m for m in spec.modules if m.mtp and _LAYER in m.pattern and _start(m) in starts]


def in_layers(spec: ArchSpec, modules: Iterable[ModuleSpec]) -> list[ModuleSpec]:
    """Those of `modules` that a layer which predicts further tokens has."""
    starts = {_start(module) for module in added(spec)}
    return [m for m in modules if _LAYER in m.pattern and _start(m) in starts]


def block(spec: ArchSpec) -> tuple[ModuleSpec, ...]:
    """The modules that predict further tokens and stand beside the decoder's, as `mtp.*` do."""
    own = added(spec)
    return tuple(module for module in spec.modules if module.mtp and module not in own)


def in_block(spec: ArchSpec, config: dict[str, Any], shown: Iterable[int]) -> range:
    """Numbers of the block's layers. shown: those of layers that a checkpoint has tensors of."""
    return range(max(_count(spec, config) or 0, 1 + max(shown, default=0)))


def _start(module: ModuleSpec) -> str:
    """The name before the number of the layer."""
    return module.pattern.partition(_LAYER)[0]


def _count(spec: ArchSpec, config: dict[str, Any]) -> int | None:
    """How many there are according to config.json, None where it does not say."""
    value = config.get(spec.mtp_layers) if spec.mtp_layers else None
    if value is not None and (type(value) is not int or value < 0):
        raise CheckpointError(
            f"{spec.mtp_layers} is {value!r} in config.json: write a whole number there."
        )
    return value
