"""What config.json says of the sizes, held against the shapes of the tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.models.claims import Claim
from nvfp4cli.models.modules import ModuleSpec, Role
from nvfp4cli.models.sizes import Sizes
from nvfp4cli.models.spec import ArchSpec

# What every decoder has, whatever its spec says.
_NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers")
_ANY = "any"
# Shapes where the spec gives none: an axis of the residual stream, the other of any length.
_OF_ROLE: dict[Role, tuple[str, ...] | None] = {
    "embed": (_ANY, "hidden_size"),
    "norm": ("hidden_size",),
    "post_norm": ("hidden_size",),
    "reader": (_ANY, "hidden_size"),
    "writer": ("hidden_size", _ANY),
    "joiner": ("hidden_size", _ANY),
    "inner": None,
}


def check_model_type(config: dict[str, Any], *, described: bool) -> None:
    """Raise where config.json names no architecture that is described.

    described: a spec of it is at hand. Raises CheckpointError where there is no model_type,
    UnsupportedError for a wrapper of a language model that nobody describes.
    """
    name = config.get("model_type")
    if name is None:
        raise CheckpointError(
            "config.json has no model_type: add it, or name the checkpoint of a decoder-only "
            "language model."
        )
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"model_type is {name!r} in config.json: write the name of an architecture there."
        )
    if not described and ("vision_config" in config or "text_config" in config):
        kind = "vision-language" if "vision_config" in config else "multimodal"
        raise UnsupportedError(
            f"{name} is a {kind} wrapper, which this version does not cover: save its language "
            "model alone with transformers, and name that checkpoint."
        )


def sizes(spec: ArchSpec, config: dict[str, Any]) -> Sizes:
    """The sizes of a model, each a positive whole number.

    Raises CheckpointError for one that is not, and where one is no multiple of another though it
    must be.
    """
    found = spec.sizes(config)
    for name in (*_NEEDED, *spec.defaults):
        found[name]  # raises
    for name, divisor in spec.multiples.items():
        if found[name] % found.of(divisor):
            raise CheckpointError(
                f"{name} is {found[name]} in config.json, which is no multiple of {divisor}, "
                f"{found.of(divisor)}: correct config.json."
            )
    return found


def check(
    claims: Iterable[Claim | None],
    shapes: Mapping[str, tuple[int, ...]],
    model: Sizes,
    experts: str | None = None,
) -> None:
    """Raise CheckpointError for the first tensor whose shape is not what config.json says.

    shapes: of the tensors by name. experts: the size that counts them.
    """
    for claim in claims:
        if claim is not None:
            _check(claim, shapes[claim.tensor], model, experts or _ANY)


def _check(claim: Claim, shape: tuple[int, ...], model: Sizes, experts: str) -> None:
    if 0 in shape:
        raise CheckpointError(
            f"{claim.tensor} has shape {list(shape)} and so no values: restore the weights."
        )
    axes = _axes(claim.spec, experts)
    if axes is not None and claim.part == "bias":
        axes = tuple(axes[i] for i, axis in enumerate(claim.spec.axes.split()) if axis != "in")[
            : len(axes)
        ]
    if axes is None:
        return
    if len(axes) != len(shape):
        raise CheckpointError(
            f"{claim.tensor} has shape {list(shape)} instead of {len(axes)} "
            f"{'axis' if len(axes) == 1 else 'axes'}: restore the weights."
        )
    for axis, length in zip(axes, shape, strict=True):
        if axis != _ANY and not model.fits(axis, length):
            raise CheckpointError(
                f"{model.explained(axis)}, and {claim.tensor} has shape "
                f"{list(shape)}: correct config.json, or restore the weights."
            )


def _axes(spec: ModuleSpec, experts: str) -> tuple[str, ...] | None:
    """Expressions for the axes of a weight as it is stored, None where nothing is demanded."""
    matrix = _OF_ROLE[spec.role]
    if spec.shape or matrix is None:
        return spec.shape
    if len(matrix) == 1:
        return matrix
    named = {"out": matrix[0], "in": matrix[1], "expert": experts}
    return tuple(named[axis] for axis in spec.axes.split())
