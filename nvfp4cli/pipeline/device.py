"""Jobs on a GPU: read, copied there, computed, copied back and written at the same time."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.calibrate.statistics import Statistics
from nvfp4cli.checkpoint.writer import ShardWriter
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.kernels.threads import single_threaded
from nvfp4cli.layouts.sources import Source, SourceTensor
from nvfp4cli.pipeline import compute, importance
from nvfp4cli.pipeline.staging import PINNED_BYTES, Loaded, Numbers, Staging
from nvfp4cli.pipeline.writing import Queue, emit, exported
from nvfp4cli.plan.record import Job, Member, Plan

# Source bytes of a turn of rows: a fold holds about six times as much.
TILE_BYTES = 16 << 20


@dataclass(frozen=True)
class _Span:
    """[first, last) along the first axis of a tensor, and the shape that it has."""

    name: str
    first: int
    last: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are copied to the device."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Turn:
    """What passes through the device at once: a job, or rows [start, stop) of its one tensor.

    A job that is only copied, or rounded to another dtype, takes its turn on the host.
    """

    job: Job
    rows: tuple[int, int] | None = None

    @property
    def last(self) -> bool:
        """True for the turn that completes its job."""
        return self.rows is None or self.rows[1] == self.job.members[0].shape[0]

    def span(self, member: Member) -> _Span:
        """What is read of a member; parts of one expert's matrix have the same."""
        tensor = member.source
        if member.piece and member.piece.expert is not None:
            first = member.piece.expert
            return _Span(tensor.name, first, first + 1, tensor.shape[1:], _read_dtype(tensor))
        if self.rows is None:
            return _whole(tensor)
        first, last = self.rows
        shape = (last - first, *tensor.shape[1:])
        return _Span(tensor.name, first, last, shape, _read_dtype(tensor))

    def spans(self, source: Source) -> list[_Span]:
        """What is read: of the members, in order, then whole tensors that edits need."""
        own = [self.span(member) for member in self.job.members]
        names = [n for member in self.job.members for edit in member.edits for n in edit.reads]
        needed = [_whole(source.tensors[name]) for name in names]
        return list(dict.fromkeys([*own, *needed]))


def _whole(tensor: SourceTensor) -> _Span:
    rows = tensor.shape[0] if tensor.shape else 1
    return _Span(tensor.name, 0, rows, tensor.shape, _read_dtype(tensor))


def _read_dtype(tensor: SourceTensor) -> torch.dtype:
    return tensor.dtype if tensor.stored else torch.float32


@dataclass(frozen=True)
class _Begun:
    """A turn whose largest magnitudes are on their way to the host.

    tensors: of each member, edited and in the dtype it is stored in or encoded from. maxima: None
    for a turn of the host.
    """

    turn: Turn
    tensors: list[Tensor]
    maxima: Numbers | None


def computed(job: Job) -> bool:
    """Whether a device has anything to compute for the job."""
    return any(member.action == "quantize" or member.edits for member in job.members)


def turns(job: Job) -> list[Turn]:
    """The turns of a job, in order."""
    member = job.members[0]
    if not (computed(job) and member.streamed and member.source.nbytes):
        return [Turn(job)]
    rows = member.shape[0]
    step = max(1, TILE_BYTES * rows // _whole(member.source).nbytes)
    return [Turn(job, (start, min(start + step, rows))) for start in range(0, rows, step)]


def on_device(
    plan: Plan,
    jobs: Sequence[Job],
    shards: ShardWriter,
    staging: Staging,
    statistics: Statistics | None,
) -> compute.Work:
    """Carry out jobs, one being read, one computed, and results copied back and written.

    The largest magnitudes of a turn are asked for before the host waits for those of the turn
    before it, so that the device has work meanwhile.
    """
    order = [turn for job in jobs for turn in turns(job)]
    with single_threaded(1, "read") as read_pool, single_threaded(1, "write") as write_pool:
        passage = _Passage(plan, shards, staging, write_pool, statistics)
        loads = _one_ahead(read_pool, passage.load, [t for t in order if computed(t.job)])
        before: _Begun | None = None
        for turn in (*order, None):
            begun = None
            if turn is not None:
                begun = passage.begin(turn, next(loads) if computed(turn.job) else None)
            if before is not None:
                warnings = passage.finish(before)
                if before.turn.last:
                    yield before.turn.job, warnings
            before = begun
        passage.drain()


def _one_ahead(
    pool: ThreadPoolExecutor, load: Callable[[Turn], Loaded], order: list[Turn]
) -> Iterator[Loaded]:
    """What `load` gives for each turn, the next one being loaded while one is used."""
    ahead: Future[Loaded] | None = None
    for turn in order:
        ready, ahead = ahead, pool.submit(load, turn)
        if ready is not None:
            yield ready.result()
    if ahead is not None:
        yield ahead.result()


class _Passage:
    """The way of a turn: `load` in the reading thread, `begin` and `finish` in the caller's."""

    def __init__(
        self,
        plan: Plan,
        shards: ShardWriter,
        staging: Staging,
        write_pool: ThreadPoolExecutor,
        statistics: Statistics | None,
    ) -> None:
        self._plan = plan
        self._statistics = statistics
        self._source = plan.source
        self._shards = shards
        self._staging = staging
        self._write_pool = write_pool
        self._writing = Queue(PINNED_BYTES)
        self._compiled = False

    def load(self, turn: Turn) -> Loaded:
        """Read what a turn needs and copy it to the device."""
        spans = turn.spans(self._source)
        decoded: dict[int, Tensor] = {}

        def read(index: int, start: int, target: Tensor) -> None:
            span = spans[index]
            tensor = self._source.tensors[span.name]
            if tensor.stored:
                info = self._source.checkpoint.tensors[span.name]
                first = span.first * (info.nbytes // max(1, info.shape[0] if info.shape else 1))
                data = self._source.checkpoint.read_bytes(
                    info, first + start, first + start + len(target)
                )
                target.copy_(data)
                return
            if index not in decoded:
                decoded.clear()
                values = self._source.read_rows(span.name, span.first, span.last)
                decoded[index] = values.contiguous().view(-1).view(torch.uint8)
            target.copy_(decoded[index][start : start + len(target)])

        with self._fitting(turn.job):
            return self._staging.load([span.nbytes for span in spans], read)

    def begin(self, turn: Turn, loaded: Loaded | None) -> _Begun:
        """Edit the members and ask for their largest magnitudes; loaded: None on the host."""
        if loaded is None:
            return _Begun(turn, [], None)
        with self._fitting(turn.job), self._staging.computing(loaded):
            tensors = self._edited(turn, loaded.tensors)
            maxima = self._staging.fetch(torch.stack([_amax(tensor) for tensor in tensors]))
        return _Begun(turn, tensors, maxima)

    def _edited(self, turn: Turn, loaded: list[Tensor]) -> list[Tensor]:
        """Each member as it is stored or encoded. Empties `loaded`, uint8 of each source."""
        spans, members = turn.spans(self._source), turn.job.members
        held = {
            span: tensor.view(span.dtype).view(span.shape)
            for tensor, span in zip(loaded, spans, strict=True)
        }
        loaded.clear()
        needed = {span.name: tensor for span, tensor in held.items()}
        data = [held[turn.span(member)] for member in members]
        held.clear()  # so that each source is freed once it has been edited
        for i, member in enumerate(members):
            read = {name: needed[name] for edit in member.edits for name in edit.reads}.__getitem__
            needed.pop(member.source.name, None)
            data[i] = compute.edited(member, data[i], read)
            if member.action == "quantize":
                data[i] = compute.encodable(data[i])
            else:
                data[i] = data[i].to(member.outputs[0].dtype)
        return data

    def finish(self, begun: _Begun) -> list[str]:
        """Encode the members and send the results to the disk; returns warnings."""
        job = begun.turn.job
        if begun.maxima is None:
            self._submit(0, self._on_host, job)
            return []
        maxima = begun.maxima.take()
        compute.check_maxima(job, maxima, self._source.read)
        results: Sequence[compute.Result] = begun.tensors
        warnings: list[str] = []
        with self._fitting(job), self._staging.computing():
            if job.members[0].action == "quantize":
                estimate = importance.estimate(self._plan, job.members[0])
                results, warnings = compute.quantized(
                    job, begun.tensors, maxima, self._plan.recipe, self._statistics, estimate
                )
            named = self._exported(job, results)
        names, offset = list(named), self._offset(begun.turn)

        def write(index: int, start: int, data: Tensor) -> None:
            self._shards.write_bytes(names[index], offset + start, data)

        for cargo in self._staging.send(list(named.values())):
            self._submit(len(cargo.buffer), cargo.deliver, write)
        if not self._compiled:
            self._compiled = True
            self._staging.restart_clock()
        return warnings

    def _exported(self, job: Job, results: Sequence[compute.Result]) -> dict[str, Tensor]:
        """The tensors to write, contiguous, of members that are not on disk already."""
        named: dict[str, Tensor] = {}
        for member, result in zip(job.members, results, strict=True):
            assert result is not None
            if self._shards.wants(member.outputs[0].name):
                named |= exported(self._plan, member, result)
        return {name: tensor.contiguous() for name, tensor in named.items()}

    def _offset(self, turn: Turn) -> int:
        """Where the rows of a turn begin, in bytes of the tensor that is written."""
        if turn.rows is None:
            return 0
        output = turn.job.members[0].outputs[0]
        return turn.rows[0] * (output.nbytes // output.shape[0])

    def _on_host(self, job: Job) -> None:
        """A job without edits, in the writing thread; whole where it is not a matrix."""
        read = self._source.read
        results: list[compute.Result] = [
            None
            if m.streamed
            else compute.cache_scales(m.module, self._statistics, self._plan.recipe.kv_cache)
            if m.action == "cache"
            else compute.rounded(compute.edited(m, compute.stored(m, self._source), read), m, read)
            for m in job.members
        ]
        emit(self._plan, job, results, self._shards)

    def _submit(self, nbytes: int, task: Callable[..., None], *arguments: object) -> None:
        """Hand a task to the writing thread; raises the error of an earlier one."""
        self._writing.append(self._write_pool.submit(task, *arguments), nbytes)
        self._writing.make_room(0)

    def drain(self) -> None:
        """Wait until all is written; raises the error of a task."""
        self._writing.drain()

    @contextmanager
    def _fitting(self, job: Job) -> Iterator[None]:
        """Raise UnsupportedError where the device runs out of memory over the job."""
        try:
            yield
        except torch.OutOfMemoryError:
            rotated = any(member.edits for member in self._plan.members)
            step = "start in another folder with --device cpu"
            raise UnsupportedError(
                f"The GPU has too little free memory for {job.members[0].name}, "
                f"{job.source_bytes / 1e9:.2f} GB with its group: "
                f"{step if rotated else 'continue with --device cpu --resume'}."
            ) from None


def _amax(tensor: Tensor) -> Tensor:
    """Largest magnitude, fp64 on the tensor's device, which it does not wait for. Keeps a NaN."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high).double()
