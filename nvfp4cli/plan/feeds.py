"""What makes the input of each matrix: the norm before it, or the matrices whose outputs it reads.

Of that `pipeline.importance` estimates what a calibration text would show.
"""

from collections.abc import Collection, Iterator

from nvfp4cli.models.claims import Claim, recognize
from nvfp4cli.models.scaling import Scaling, scalings
from nvfp4cli.models.sizes import Sizes
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.plan.record import Feed, Member


def feeds(
    spec: ArchSpec, claims: Collection[Claim | None], sizes: Sizes, members: Collection[Member]
) -> dict[str, Feed]:
    """By the name of the weight; absent where the spec does not say.

    claims: of all tensors. members: what becomes of them.
    """
    sources: dict[str, list[Member]] = {}
    modules: dict[str, list[Member]] = {}
    for member in members:
        if member.action != "cache":
            sources.setdefault(member.source.name, []).append(member)
            modules.setdefault(member.module, []).append(member)
    found: dict[str, Feed] = {}
    for scaling in scalings(spec, claims, sizes):
        if scaling.producers[0].spec.role == "norm" or scaling.channels is not None:
            found |= _scaled(scaling, sources)
    return found | dict(_gated(spec, modules))


def _scaled(scaling: Scaling, sources: dict[str, list[Member]]) -> dict[str, Feed]:
    """The inputs behind a norm, or of values."""
    parts = [_of(claim, sources) for claim in scaling.producers]
    if any(len(part) != 1 for part in parts):
        return {}
    made = tuple(part[0] for part in parts)
    feed = Feed((made,), scaling.channels, scaling.offset)
    return {m.name: feed for claim in scaling.consumers for m in _of(claim, sources)}


def _of(claim: Claim, sources: dict[str, list[Member]]) -> list[Member]:
    return sources.get(claim.source or claim.tensor, [])


def _gated(spec: ArchSpec, modules: dict[str, list[Member]]) -> Iterator[tuple[str, Feed]]:
    """The inputs that are a function of a gate times a projection; of experts, of each its own."""
    named = {f"{module}.weight": module for module in modules}
    claims, _ = recognize(spec, named)
    for name, claim in claims.items():
        if claim is None or not claim.spec.gated:
            continue
        gate, up = (modules.get(claim.sibling(part)) for part in claim.spec.gated)
        if gate and up:
            for member in modules[named[name]]:
                yield member.name, Feed((tuple(gate), tuple(up)))
