"""Where the matrices of a checkpoint are in the modules that compute with them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models.claims import Claim, numbered
from nvfp4cli.models.modules import ModuleSpec
from nvfp4cli.models.pieces import pieces, upright
from nvfp4cli.models.spec import ArchSpec

_IN_LAYER = re.compile(r"^(?:.*?\.)?(\d+)\.")  # up to the number of the layer


@dataclass(frozen=True)
class Matrix:
    """One matrix that is quantised, where it is computed with.

    name: the module as which it is written. operand: what the product is called with, a parameter
    or the slice of an expert; it may hold several matrices. values: the matrix [out, in] in it, a
    view.
    """

    name: str
    operand: Tensor
    values: Tensor


def matrices(
    spec: ArchSpec, names: Iterable[str], number: int | None, module: nn.Module
) -> dict[str, Matrix]:
    """The matrices of a decoder layer by name, in the order of `names`.

    names: as which they are written. number: of the layer; None: module is the whole model.
    Raises UnsupportedError for one that the module holds nowhere.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    together: dict[str, Matrix] | None = None
    found = {}
    for name in names:
        path = _IN_LAYER.sub("", name, count=1) if number is not None else name
        if (weight := parameters.get(f"{path}.weight")) is not None and weight.ndim == 2:
            turned = type(module.get_submodule(path)).__name__ == "Conv1D"
            found[name] = Matrix(name, weight, upright(weight, turned))
            continue
        if together is None:
            together = {one.name: one for one in _together(spec, number, parameters)}
        if name not in together:
            raise UnsupportedError(
                f"transformers' modules hold no matrix {name}, so that its inputs cannot be seen: "
                "use a method that needs no calibration (--method mse)."
            )
        found[name] = together[name]
    return found


def placed(parts: Iterable[tuple[Matrix, Tensor]]) -> Tensor | None:
    """Values [out, in] of matrices with one operand, in the form of that operand; zero elsewhere.

    Of the operand's dtype and strides; None where there are no values.
    """
    found: Tensor | None = None
    for one, values in parts:
        operand = one.operand
        if found is None:
            found = operand.new_empty_strided(operand.shape, operand.stride()).zero_()
        start = one.values.storage_offset() - operand.storage_offset()
        found.as_strided(one.values.shape, one.values.stride(), start).copy_(values)
    return found


def of_model(spec: ArchSpec, names: Iterable[str], model: PreTrainedModel) -> dict[str, Matrix]:
    """The matrices of a whole model by name."""
    prefix, _ = decoder_layers(model)
    by_layer: dict[int | None, list[str]] = {}
    for name in names:
        number = _IN_LAYER.match(name)
        by_layer.setdefault(int(number[1]) if number else None, []).append(name)
    found: dict[str, Matrix] = {}
    for layer, own in by_layer.items():
        module = model if layer is None else model.get_submodule(f"{prefix}.{layer}")
        found |= matrices(spec, own, layer, module)
    return found


def decoder_layers(model: PreTrainedModel) -> tuple[str, int]:
    """Where the decoder layers are in a model, and how many."""
    count = model.config.get_text_config().num_hidden_layers
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return names[id(module)], count
    raise UnsupportedError(
        f"{type(model).__name__} keeps its decoder layers in no list of {count}: use a method "
        "that needs no calibration (--method mse)."
    )


def _together(
    spec: ArchSpec, number: int | None, parameters: Mapping[str, Tensor]
) -> Iterator[Matrix]:
    """The matrices in parameters that hold those of all experts, or several side by side."""
    for module in spec.modules:
        if not module.written_as:
            continue
        name = numbered(module.pattern, number)
        tensor = name + (module.suffixes.weight or "")
        path = _IN_LAYER.sub("", tensor, count=1) if number is not None else tensor
        if (weight := parameters.get(path)) is not None and weight.ndim == 3:
            yield from _of_experts(module, name, tensor, number, weight)


def _of_experts(
    module: ModuleSpec, name: str, tensor: str, number: int | None, weight: Tensor
) -> Iterator[Matrix]:
    claim = Claim(tensor, name, "weight", module, number)
    for piece in pieces(claim, tuple(weight.shape)):
        assert piece.expert is not None
        operand = weight[piece.expert]
        yield Matrix(piece.module, operand, piece.of(operand))
