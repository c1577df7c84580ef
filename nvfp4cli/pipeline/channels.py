"""The channel scales of a plan."""

import json
from collections.abc import Generator

import torch
from torch import Tensor

from nvfp4cli.calibrate import channels
from nvfp4cli.calibrate.channels import Readers
from nvfp4cli.calibrate.text import Sequences
from nvfp4cli.pipeline.calibrated import BATCH_TOKENS, folded
from nvfp4cli.plan.record import Plan
from nvfp4cli.rotate.channels import held
from nvfp4cli.runtime.parts import Parts

# Root mean squares of channels need no more of a text.
_TOKENS = 16384


def channel_scales(
    plan: Plan, text: Sequences, device: str
) -> Generator[str, None, dict[str, Tensor]]:
    """The factors of each input of decoder layers, by `Scaling.name`; none where ones are best.

    Yields the stages of the plan as they are done. Raises what `Parts` raises.
    """
    assert plan.spec is not None
    tensors = folded(plan)
    parts = Parts(
        json.loads(plan.files["config.json"]), tensors, dtype=torch.float32, device=device
    )
    length = text.tokens.shape[1]
    tokens = text.tokens[: max(1, _TOKENS // length)]
    size = max(1, BATCH_TOKENS[torch.device(device).type] // length)
    searching = channels.search(
        parts,
        plan.spec,
        tokens.split(size),
        _readers(plan),
        static=plan.recipe.scheme == "w4a4",
    )
    while True:
        try:
            yield f"layer {next(searching)}"
        except StopIteration as end:
            found: dict[str, Tensor] = end.value
            break
    dtypes = {member.name: member.outputs[0].dtype for member in plan.members}
    gains = {
        one.name: (claim.tensor, one.offset)
        for one in plan.facts.scalings
        for claim in one.producers
        if claim.spec.role == "norm" and claim.part == "weight"
    }
    for name, (gain, offset) in gains.items():
        if name in found:
            found[name] = held(found[name], tensors[gain]().to(dtypes[gain]), offset)
    return found


def _readers(plan: Plan) -> dict[int, list[Readers]]:
    """Inputs that may be scaled and are read by a matrix that is quantised, by the layer."""
    written: dict[str, list[str]] = {}
    for member in plan.members:
        if member.quantized:
            written.setdefault(member.weight, []).append(member.module)
    found: dict[int, list[Readers]] = {}
    for one in plan.facts.scalings:
        modules = [module for claim in one.consumers for module in written.get(claim.tensor, ())]
        if modules:
            readers = Readers(one.name, tuple(modules), one.channels)
            found.setdefault(one.layer, []).append(readers)
    return found
