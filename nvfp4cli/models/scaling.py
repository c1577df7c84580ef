"""Which linear modules share an input that can be scaled channel by channel, and what makes it.

With a factor s for each channel, columns of the consumers take s and the producer takes 1/s: the
function stays. A producer is

    the gain and bias of a norm          of all readers behind it
    rows and bias of a value projection  of the linear module that reads the heads, as R2 does; a
                                         value head's channel serves all query heads that share it
    rows and bias of a gated projection  of the module whose input is its output times a gate
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from nvfp4cli.models.claims import Claim
from nvfp4cli.models.modules import NO_NORM
from nvfp4cli.models.sizes import Sizes
from nvfp4cli.models.spec import ArchSpec


@dataclass(frozen=True)
class Scaling:
    """An input of which every channel may be scaled.

    consumers: weights, whose columns take s. producers: tensors of one module, whose rows take 1/s:
    the one of a norm is (offset + tensor) / s - offset, and its bias bias / s; all others have an
    offset of 0. channels: of each column the row that it is made from; None: the same.
    """

    consumers: tuple[Claim, ...]
    producers: tuple[Claim, ...]
    channels: tuple[int, ...] | None = None
    offset: float = 0.0


def scalings(spec: ArchSpec, claims: Collection[Claim | None], sizes: Sizes) -> Iterator[Scaling]:
    """The inputs of a model's decoder layers that can be scaled.

    claims: of all tensors. Left out are: the last norm, whose reader is the output head; tensors
    that hold experts, as producers; what predicts further tokens; the value path of a model whose
    spec refuses R2; a norm without a gain of its own.
    """
    found = [c for c in claims if c is not None and c.layer is not None and not c.mtp]
    modules: dict[str, list[Claim]] = {}
    for claim in found:
        modules.setdefault(claim.module, []).append(claim)
    weights = [claim for claim in found if claim.part == "weight"]
    yield from _behind_norms(spec, weights, modules)
    if "r2" not in spec.refuse:
        yield from _behind_values(spec, weights, modules, sizes)
    for claim in weights:
        if claim.spec.gated:
            producer = claim.sibling(claim.spec.gated[1])
            if producer in modules:
                yield Scaling((claim,), tuple(modules[producer]))


def _behind_norms(
    spec: ArchSpec, weights: list[Claim], modules: dict[str, list[Claim]]
) -> Iterator[Scaling]:
    readers: dict[str, list[Claim]] = {}
    for claim in weights:
        for norm in claim.spec.norm:
            if norm != NO_NORM:
                readers.setdefault(claim.sibling(norm), []).append(claim)
    offset = 1.0 if spec.norm_gain == "one_plus" else 0.0
    for norm, behind in readers.items():
        parts = modules.get(norm, ())
        gain = any(part.part == "weight" for part in parts)
        if gain and all(claim.spec.role == "reader" for claim in behind):
            yield Scaling(tuple(behind), tuple(parts), offset=offset)


def _behind_values(
    spec: ArchSpec, weights: list[Claim], modules: dict[str, list[Claim]], sizes: Sizes
) -> Iterator[Scaling]:
    producers = {c.layer: c for c in weights if c.spec.heads == "kv_rows"}
    heads, size = (sizes.of(spec.value_path[key]) for key in ("heads", "head_dim"))
    for claim in weights:
        producer = producers.get(claim.layer)
        if claim.spec.heads != "query_columns" or producer is None:
            continue
        start, pitch = 0, size
        if rows := producer.spec.value_rows:
            start, pitch = sizes.of(rows.start), sizes.of(rows.pitch)
        shared = sizes["num_attention_heads"] // heads
        channels = tuple(
            start + head * pitch + channel
            for head in range(heads)
            for _ in range(shared)
            for channel in range(size)
        )
        yield Scaling((claim,), tuple(modules[producer.module]), channels)
