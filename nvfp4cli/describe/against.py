"""Errors of a checkpoint against the unquantised model it was made from.

The source is folded and rotated first, as the checkpoint's own record says, so that what remains
is the error of the quantisation.
"""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nvfp4cli.checkpoint.files import CHANNELS
from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.describe import folder
from nvfp4cli.describe.architecture import spec_of
from nvfp4cli.describe.inventory import Inventory
from nvfp4cli.describe.record import Violation, Weight
from nvfp4cli.describe.values import check_measurable, decode, same_bytes
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.layouts import open_weights
from nvfp4cli.layouts.sources import Source, SourceTensor, open_source
from nvfp4cli.models.claims import Claim, as_written, recognize
from nvfp4cli.models.pieces import Piece, matrix_shape, pieces, transposed, upright
from nvfp4cli.models.scaling import scalings
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.rotate import channels, fold
from nvfp4cli.rotate.fold import Rotations

_WORST = 10
# Swapped nibbles give -3 dB, block scales of other rows 9; real weights about 20.
_LEAST_SNR_DB = 12.0
_TIED = ("lm_head.weight", "model.embed_tokens.weight")  # where no spec tells


@dataclass(frozen=True)
class Deviation:
    """Of one tensor from its (folded) source, with w the source and w' what is stored.

    kind: "quantized", "edited" (folded, or of another dtype) or "copied". snr_db: 10 log10(sum w^2
    / sum (w - w')^2), inf for equal tensors. relative_error: the square root of the inverse ratio.
    changed_bits_share: of copied tensors only.
    """

    name: str
    kind: Literal["quantized", "edited", "copied"]
    snr_db: float
    relative_error: float
    max_abs_error: float
    changed_bits_share: float | None


@dataclass(frozen=True)
class Comparison:
    """All deviations in name order, and the broken invariants."""

    source: str
    deviations: tuple[Deviation, ...]
    violations: tuple[Violation, ...]

    @property
    def worst(self) -> list[Deviation]:
        """Those with the lowest SNR first; tensors without an error are left out."""
        finite = [d for d in self.deviations if d.snr_db < math.inf]
        return sorted(finite, key=lambda d: d.snr_db)[:_WORST]

    @property
    def mean_snr_db(self) -> float | None:
        """Mean over the quantised tensors that have an error, None if there is none."""
        found = [d.snr_db for d in self.deviations if d.kind == "quantized"]
        found = [snr for snr in found if math.isfinite(snr)]
        return sum(found) / len(found) if found else None

    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "source": self.source,
            "mean_snr_db": self.mean_snr_db,
            "worst": [asdict(deviation) for deviation in self.worst],
            "tensors": [asdict(deviation) for deviation in self.deviations],
        }


def compare(
    inventory: Inventory, source: Checkpoint, name: str, unreadable: Collection[str]
) -> Comparison:
    """Measure every tensor, one at a time.

    name: the source as the user calls it. unreadable: weights that lack a part. Raises
    CheckpointError for a source that is in NVFP4 itself, UnsupportedError where the rotation
    cannot be repeated or a weight cannot be decoded.
    """
    for weight in inventory.weights:
        check_measurable(weight)
    if open_weights(source).layout is not None:
        raise CheckpointError(
            f"{name} is quantised itself: give the unquantised model that the checkpoint was made "
            "from."
        )
    original = _Original.of(
        open_source(source),
        spec_of(inventory.checkpoint),
        inventory.checkpoint,
    )
    weights = {weight.name: weight for weight in inventory.weights}
    found = _check_names(weights, original, name)
    deviations = []
    for weight in weights.values():
        info = original.info(weight.name)
        if info is None or weight.name in unreadable:
            continue
        shape = original.shape(weight)
        if weight.shape != shape:
            message = (
                f"{weight.name} has shape {list(weight.shape or ())} and its source "
                f"{list(shape)}: check that {name} is the source."
            )
            found.append(Violation(weight.name, "source-shape", message))
            continue
        deviation = _deviation(weight, info, inventory, original)
        if deviation.kind == "quantized" and deviation.snr_db < _LEAST_SNR_DB:
            message = (
                f"{weight.name} is {deviation.snr_db:.1f} dB from its source, where NVFP4 gives "
                "about 20: its codes or scales are out of order; quantise the source again."
            )
            found.append(Violation(weight.name, "snr", message))
        deviations.append(deviation)
        if deviation.changed_bits_share:
            message = (
                f"{weight.name} is a copy that differs from its source in "
                f"{deviation.changed_bits_share:.2%} of its bits: write the checkpoint again."
            )
            found.append(Violation(weight.name, "copy-changed", message))
    return Comparison(name, tuple(deviations), tuple(found))


@dataclass(frozen=True)
class _Original:
    """The source under the names that the checkpoint gives its tensors.

    claims: by either's names, of what the spec knows. tied: head -> embedding, where the source
    ties them. parts: an expert's tensor -> the source's that holds it, and which part; None for
    one that has another name there. scaled: what channel scales have made of tensors, by the
    source's names.
    """

    source: Source
    spec: ArchSpec | None
    rotations: Rotations | None
    claims: dict[str, Claim | None]
    tied: dict[str, str]
    parts: dict[str, tuple[str, Piece | None]]
    scaled: dict[str, tuple[fold.Edit, ...]]

    @classmethod
    def of(cls, source: Source, spec: ArchSpec | None, quantized: Checkpoint) -> "_Original":
        record = folder.read_record(quantized.folder)
        rotated = record is not None and record.names != "none"
        config = source.checkpoint.config
        if spec is None:
            if rotated:
                raise UnsupportedError(
                    f"The checkpoint is rotated and there is no spec of "
                    f"{config.get('model_type')!r} to rotate the source with: leave out "
                    "--against."
                )
            tied = dict([_TIED]) if config.get("tie_word_embeddings") else {}
            return cls(source, None, None, {}, tied, {}, {})
        config = spec.language(config)
        claims, _ = recognize(spec, source.tensors)
        factors = folder.read_channels(quantized.folder)
        inputs = list(scalings(spec, claims.values(), spec.sizes(config))) if factors else []
        channels.check_known(factors, inputs, CHANNELS)
        tied = {}
        if spec.tied(config):
            tied = {f"{m.pattern}.weight": f"{m.tied_to}.weight" for m in spec.heads}
            for module in spec.heads:
                head = f"{module.pattern}.weight"
                claims[head] = Claim(head, module.pattern, "weight", module, None)
        parts: dict[str, tuple[str, Piece | None]] = {}
        for name, one in as_written(claims).items():
            if one and one.source:
                parts[name], claims[name] = (one.source, None), one
        parts |= {
            f"{piece.module}.{one.part}": (one.tensor, piece)
            for one in claims.values()
            if one and one.spec.per_expert and one.spec.written_as
            for piece in pieces(one, source.tensors[one.tensor].shape)
        }
        rotations = None
        if rotated:
            assert record is not None
            sizes = spec.sizes(config)
            rotations = Rotations.of(record.names, record.kind, record.seed, spec, sizes)
        scaled = channels.edits(inputs, factors)
        return cls(source, spec, rotations, claims, tied, parts, scaled)

    def _place(self, name: str) -> tuple[str, Piece | None]:
        """The source's tensor, and which part of it: a tied head is the embedding."""
        return self.parts.get(name) or (self.tied.get(name, name), None)

    def is_part(self, name: str) -> bool:
        """The source holds it together with others."""
        return self._place(name)[1] is not None

    def info(self, name: str) -> SourceTensor | None:
        """What the source holds of a tensor."""
        return self.source.tensors.get(self._place(name)[0])

    def _claim(self, name: str) -> Claim | None:
        place, piece = self._place(name)
        return self.claims.get(place if piece else name)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """What a weight's must be: quantised, a source's matrix may lie the other way round."""
        place, piece = self._place(weight.name)
        stored, one = self.source.tensors[place].shape, self._claim(weight.name)
        if one is None or (piece is None and weight.format == "plain"):
            return stored
        matrix = matrix_shape(one, stored)
        return (piece.rows, *matrix[1:]) if piece else matrix

    def edits(self, name: str) -> tuple[fold.Edit, ...]:
        """What was done to the tensor before it was quantised."""
        one = self._claim(name)
        if one is None or self.spec is None:
            return ()
        scaled = self.scaled.get(one.source or one.tensor, ())
        if self.rotations is None:
            return scaled
        sizes = self.spec.sizes(self.spec.language(self.source.checkpoint.config))
        shape = matrix_shape(one, self.source.tensors[self._place(name)[0]].shape)
        return (*fold.edits(one, self.spec, self.rotations, sizes, shape), *scaled)

    def turned(self, name: str) -> bool:
        """The tensor holds [in, out]."""
        one = self._claim(name)
        return one is not None and transposed(one)

    def read(self, weight: Weight) -> Tensor:
        """The source's values in the form of the weight, not edited yet."""
        place, piece = self._place(weight.name)
        if piece is not None:
            assert piece.expert is not None
            return piece.of(self.source.read_index(place, piece.expert))
        data = self.source.read(place)
        return upright(data, weight.format != "plain" and self.turned(weight.name))


def _check_names(weights: dict[str, Weight], original: _Original, name: str) -> list[Violation]:
    """Every tensor of the source is there, and no other. A tied head may be there or not."""
    found = []
    divided: dict[str, list[str]] = {}
    for part, (whole, _) in original.parts.items():
        divided.setdefault(whole, []).append(part)
    wanted: set[str] = set()
    for tensor in original.source.tensors.keys() - original.tied.keys():
        apart = [part for part in divided.get(tensor, ()) if part in weights]
        wanted.update(divided[tensor] if apart else [tensor])
    for missing in sorted(wanted - weights.keys()):
        message = f"{missing} of {name} is missing: quantise the source again."
        found.append(Violation(missing, "source-missing", message))
    for extra in weights:
        if original.info(extra) is None:
            message = (
                f"{extra} has no counterpart in {name}: check that this is the source, then remove "
                "the tensor."
            )
            found.append(Violation(extra, "source-extra", message))
    return found


def _deviation(
    weight: Weight, info: SourceTensor, inventory: Inventory, original: _Original
) -> Deviation:
    checkpoint, source = inventory.checkpoint, original.source
    edits = original.edits(weight.name)
    if weight.format != "plain":
        kind: Literal["quantized", "edited", "copied"] = "quantized"
    else:
        own = checkpoint.tensors[weight.name]
        apart = original.is_part(weight.name) or not info.stored  # its bytes are not the source's
        kind = "edited" if edits or own.dtype != info.dtype or apart else "copied"
        if kind == "copied" and same_bytes(
            own, checkpoint, source.checkpoint.tensors[info.name], source.checkpoint
        ):
            return Deviation(weight.name, kind, math.inf, 0.0, 0.0, 0.0)
    stored = decode(weight, inventory)
    expected = original.read(weight)
    changed = _changed_bits(stored, expected) if kind == "copied" else None
    turned = weight.format == "plain" and original.turned(weight.name)
    expected = fold.apply(expected, edits, source.read, transposed=turned)
    return Deviation(weight.name, kind, *_errors(expected, stored), changed)


def _errors(expected: Tensor, stored: Tensor) -> tuple[float, float, float]:
    """SNR in dB, relative error, largest absolute error."""
    difference = expected - stored.to(expected.dtype)
    signal, noise = (
        # In double precision, since squares of weights below 1e-19 vanish in fp32.
        torch.linalg.vector_norm(x, dtype=torch.float64).item() for x in (expected, difference)
    )  # fmt: skip
    largest = difference.abs_().max().item() if difference.numel() else 0.0
    if noise == 0:
        return math.inf, 0.0, largest
    if signal == 0:
        return -math.inf, math.inf, largest
    return 20 * math.log10(signal / noise), noise / signal, largest


def _changed_bits(stored: Tensor, expected: Tensor) -> float:
    """Share of the bits of two tensors of one dtype that differ."""
    different = (stored.flatten().view(torch.uint8) ^ expected.flatten().view(torch.uint8)).long()
    bits = sum(int((different >> bit & 1).sum()) for bit in range(8))
    return bits / max(1, 8 * different.numel())
