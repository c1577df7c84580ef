"""A plan: every decision of a run, made from headers alone before any tensor data is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from nvfp4cli.checkpoint.writer import Output, Shard
from nvfp4cli.layouts import StoredWeights
from nvfp4cli.layouts.record import Layout
from nvfp4cli.layouts.sources import Source, SourceTensor
from nvfp4cli.models.pieces import Piece
from nvfp4cli.models.scaling import Scaling
from nvfp4cli.models.spec import ArchSpec
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate.fold import Edit

# quantize: edits, then NVFP4. fp8: edits, then FP8. edit: edits, rounded once to `dtype`. copy: the
# source's bytes. repack, repack_fp8: a quantised weight from one layout to another. cache: the
# scales of a KV cache, which come from calibration and no tensor of the source. recache: those
# scales from one layout to another.
Action = Literal["quantize", "fp8", "edit", "copy", "repack", "repack_fp8", "cache", "recache"]
# That a weight is stored in; source: its own dtype.
Format = Literal["nvfp4", "fp8", "source"]


@dataclass(frozen=True)
class Member:
    """One weight of the source and what becomes of it.

    name: the source model's name of the tensor. source: where it is read from, which is another
    tensor for a head that R1 unties; of cache scales, the projection beside them. module: that owns
    it. shape: of the matrix or bias that is written. reason: of the decision, for people. edits: in
    order, of a matrix [out, in]. outputs: what is written, all in one file. fused: the engines'
    merged module that a quantised weight becomes a part of. piece: where the matrix is only a part
    of a tensor of experts. transposed: the source holds [in, out]. finite: a NaN or Inf in it stops
    the run, also where its bytes are only copied.
    """

    name: str
    module: str
    source: SourceTensor
    shape: tuple[int, ...]
    action: Action
    reason: str
    edits: tuple[Edit, ...]
    outputs: tuple[Output, ...]
    fused: str | None = None
    piece: Piece | None = None
    transposed: bool = False
    finite: bool = False

    @property
    def quantized(self) -> bool:
        """True for a matrix that is rounded to few bits in this run."""
        return self.action in ("quantize", "fp8")

    @property
    def weight(self) -> str:
        """The tensor that the matrix is chosen by: of experts in one tensor, that one."""
        return self.source.name if self.piece else self.name

    @property
    def streamed(self) -> bool:
        """True for a tensor that passes through in pieces and is never whole in memory.

        Rows of a matrix or, of a tensor of experts, one expert after the other.
        """
        if self.action != "edit" or self.piece:
            return self.action == "copy"
        if len(self.shape) == 3:
            return True
        by_rows = all(edit.row_local for edit in self.edits) and not self.transposed
        return len(self.shape) == 2 and by_rows

    @property
    def source_bytes(self) -> int:
        """Bytes read for this weight."""
        if self.action == "cache":
            return 0
        if self.piece is None:
            return self.source.nbytes
        return self.source.nbytes * _numel(self.shape) // max(1, _numel(self.source.shape))

    @property
    def loaded_bytes(self) -> int:
        """Bytes in memory once it is read: what is quantised is decoded to fp32."""
        return self.source_bytes if self.source.stored else 4 * _numel(self.shape)

    @property
    def output_bytes(self) -> int:
        """Bytes written for this weight."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Job:
    """The unit of work: weights that share one global scale, or a single tensor.

    Members may lie in different source files. stage: the part of the model, "embedding",
    "layer 3" or "head"; jobs are in the order of a forward pass.
    """

    stage: str
    members: tuple[Member, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes read."""
        return sum(member.source_bytes for member in self.members)

    @property
    def held_bytes(self) -> int:
        """Bytes of results that wait in memory to be written."""
        return sum(member.output_bytes for member in self.members if not member.streamed)


@dataclass(frozen=True)
class Decision:
    """What weights with one format get.

    name: of the modules, for people. weights: `Member.weight` of each. parameters: values that they
    hold. costs: KL divergence in nats for a token that they alone cause, by format.
    """

    name: str
    weights: tuple[str, ...]
    parameters: int
    costs: dict[str, float]
    format: Format
    bits: float  # of a value


@dataclass(frozen=True)
class Budget:
    """The decisions for a model, in the order of its layers."""

    decisions: tuple[Decision, ...]

    @property
    def formats(self) -> dict[str, Format]:
        """By `Member.weight`."""
        return {name: one.format for one in self.decisions for name in one.weights}

    @property
    def bits(self) -> float:
        """That a value takes on average."""
        total = sum(one.parameters * one.bits for one in self.decisions)
        return total / sum(one.parameters for one in self.decisions)

    @property
    def divergence(self) -> float:
        """Estimate of the KL divergence, nats for a token, with codes to nearest."""
        return sum(one.costs[one.format] for one in self.decisions)

    def facts(self) -> dict[str, Any]:
        """As YAML and JSON hold them."""
        return {
            "bits": self.bits,
            "divergence": self.divergence,
            "groups": [
                {"modules": one.name, "format": one.format, "divergences": one.costs}
                for one in self.decisions
            ],
        }


@dataclass(frozen=True)
class Facts:
    """What the configuration files and the record of the run say beyond the jobs.

    model: the name the user gave. rotation: kind, seed and sizes. kept: linear modules that stay in
    the source dtype. presets: why the architecture keeps some of them -> patterns. without_mtp:
    layers that predict further tokens were left out. activations: they are quantised too. caches:
    the format of KV caches. rank: of low-rank branches, None without. untied: the output head no
    longer reuses the embedding. copies: stored heads that config.json ties and are left out, each
    with its embedding. spec_text: the architecture spec used. own_spec: it is one of the tool's and
    need not be stored. budget: what `bits` has led to. history: what the record of the source says
    of its making. scalings: inputs whose channels may be scaled, where that is wished. channels:
    the factors, by `Scaling.name`; None before they are found.
    """

    model: str
    rotation: dict[str, Any]
    kept: tuple[str, ...]
    presets: dict[str, list[str]]
    untied: bool
    without_mtp: bool
    activations: bool
    caches: str | None
    rank: int | None
    copies: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    next_step: str  # what to do with the output, {out} or {path!r} standing for its folder
    spec_text: str
    own_spec: bool
    budget: Budget | None = None
    history: dict[str, Any] = field(default_factory=dict)
    scalings: tuple[Scaling, ...] = ()
    channels: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Feed:
    """What makes the input of a matrix: the product of a function of each of some modules' outputs.

    factors: weight and bias of each module, a norm's or a linear one's. channels: of each column
    the row or place that it is made from; None: the same. offset: what a norm's weight lacks of its
    gain.
    """

    factors: tuple[tuple[Member, ...], ...]
    channels: tuple[int, ...] | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that `pipeline.run` needs.

    source: what is read. spec: of the architecture, None where it is not known. weights: the source
    as it is quantised, for `repack`. files: JSON and YAML files to write, name -> text, config.json
    among them. binary: other small files. feeds: by the names of weights, where the spec says so
    and the method asks.
    """

    source: Source
    spec: ArchSpec | None
    weights: StoredWeights
    recipe: Recipe
    layout: Layout | None  # None: nothing is quantised
    jobs: tuple[Job, ...]
    shards: tuple[Shard, ...]
    files: dict[str, str]
    facts: Facts
    binary: dict[str, bytes] = field(default_factory=dict)
    feeds: dict[str, Feed] = field(default_factory=dict)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """All weights in job order."""
        return tuple(member for job in self.jobs for member in job.members)

    @property
    def source_bytes(self) -> int:
        """Bytes of tensor data to read."""
        return sum(job.source_bytes for job in self.jobs)

    @property
    def output_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def memory_bytes(self) -> int:
        """Largest memory use above the interpreter's own, estimated.

        While one job is worked on, its sources, their fp32 forms and its outputs are in memory,
        the next job's sources, and outputs that are being written.
        """
        jobs = [[m for m in job.members if not m.streamed] for job in self.jobs]
        read = [sum(m.loaded_bytes for m in members) for members in jobs]
        worked = max(map(_work_bytes, jobs), default=0)
        return worked + max(read, default=0) + self.queue_bytes + SCRATCH_BYTES

    @property
    def queue_bytes(self) -> int:
        """Most bytes of results that may wait to be written, those being written included.

        Two jobs, so that computing never waits for one; and for small jobs what the encoder
        makes while a large tensor passes through.
        """
        return max(2 * max((job.held_bytes for job in self.jobs), default=0), MIN_QUEUE_BYTES)

    def totals(self) -> dict[str, Any]:
        """Parameters, quantised parameters, bits per parameter and bytes of the output."""
        parameters = sum(_numel(m.shape) for m in self.members)
        nvfp4 = sum(_numel(m.shape) for m in self.members if m.action in ("quantize", "repack"))
        fp8 = sum(_numel(m.shape) for m in self.members if m.action in ("fp8", "repack_fp8"))
        data = sum(m.output_bytes for m in self.members)
        return {
            "parameters": parameters,
            "quantized_parameters": nvfp4 + fp8,
            "nvfp4_parameters": nvfp4,
            "bits_per_parameter": 8 * data / parameters if parameters else 0.0,
            "bytes": data,
        }


def _work_bytes(members: list[Member]) -> int:
    """Sources, outputs and, of edited weights, the fp32 forms; twice while rows are mixed."""
    edited = [m for m in members if m.edits]
    mixed = [_numel(m.shape) * 4 for m in edited if not all(e.row_local for e in m.edits)]
    stored = sum(m.loaded_bytes + m.output_bytes for m in members)
    return stored + sum(_numel(m.shape) * 4 for m in edited) + max(mixed, default=0)


# The encoder's tiles in each thread, pieces and tiles of streamed tensors, and what the allocator
# keeps of freed blocks.
SCRATCH_BYTES = 160 << 20


MIN_QUEUE_BYTES = 32 << 20


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
