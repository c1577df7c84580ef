"""Carry out a plan: read, fold, quantise, repack, write, one job after the other.

While a job is computed the next one is read and the last one written, so memory holds two jobs at
most whatever the model's size.
"""

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nvfp4cli import __version__, kernels
from nvfp4cli.checkpoint import writer
from nvfp4cli.checkpoint.files import INDEX
from nvfp4cli.checkpoint.output import OutputFolder
from nvfp4cli.checkpoint.reader import sidecars
from nvfp4cli.checkpoint.writer import Shard, ShardWriter
from nvfp4cli.errors import CheckpointError, WeightError
from nvfp4cli.formats import nvfp4
from nvfp4cli.kernels.threads import single_threaded
from nvfp4cli.layouts.record import Stored
from nvfp4cli.plan.record import Job, Member, Plan
from nvfp4cli.rotate import fold

# What a member has become: a weight for the layout to write, a tensor, or nothing where it is
# streamed while it is written.
_Result = Stored | Tensor | None

# Kept tensors pass through in pieces of this size.
_PIECE_BYTES = 16 << 20
# Edited ones do in tiles of rows: smaller, because a fold holds about six of them in fp32 at once.
_TILE_VALUES = 1 << 20


@dataclass(frozen=True)
class Event:
    """Progress for the user: bytes of source done and in all, or a warning to show."""

    kind: Literal["progress", "warning"]
    done: int = 0
    total: int = 0
    stage: str = ""
    message: str = ""


def run(plan: Plan, out: Path, *, resume: bool = False, device: str = "cpu") -> Iterator[Event]:
    """Write the checkpoint of `plan` into the folder `out`.

    resume: continue a killed run, refused unless source, recipe and version are the same; the
    bytes are those of an uninterrupted run. device: where weights are folded and quantised.

    A weight that cannot be quantised leaves no output. Any other interruption leaves the complete
    shards for `resume`.
    """
    source = plan.weights.checkpoint.folder
    _check_disk(plan, out)
    _check_copies(plan)
    with OutputFolder(out, source, _fingerprint(plan, device), resume) as folder:
        try:
            yield from _write(plan, out, device)
        except WeightError:
            folder.discard(_files(plan))
            raise
        except OSError as error:
            raise CheckpointError(
                f"The run into {out} stopped ({error.strerror or error}): mend the cause and "
                "continue with --resume."
            ) from error
        folder.finish()


def _write(plan: Plan, out: Path, device: str) -> Iterator[Event]:
    """Shards, then sidecars, then what makes the folder loadable: config.json and the index."""
    source = plan.weights.checkpoint.folder
    done = [shard.file for shard in _published(plan, out)]
    shards = writer.ShardWriter(out, plan.shards, done)
    try:
        yield from _work(plan, shards, device)
    finally:
        shards.close()
    for name in sidecars(source):
        writer.copy_file(source / name, out / name)
    for name, text in sorted(plan.files.items(), key=lambda item: item[0] == "config.json"):
        writer.write_text(out / name, text)
    writer.write_index(out, plan.shards)


def _files(plan: Plan) -> list[str]:
    """Every file of the output."""
    source = plan.weights.checkpoint.folder
    return [*(shard.file for shard in plan.shards), INDEX, *plan.files, *sidecars(source)]


def _published(plan: Plan, out: Path) -> list[Shard]:
    """Shards that an earlier run has completed."""
    paths = [(shard, out / shard.file) for shard in plan.shards]
    return [shard for shard, path in paths if path.exists() and path.stat().st_size == shard.size]


def _check_copies(plan: Plan) -> None:
    """A stored head that config.json calls tied is left out; it must say the same."""
    checkpoint = plan.weights.checkpoint
    for head, embedding in plan.facts.copies:
        infos = [checkpoint.tensors[name] for name in (head, embedding)]
        same = infos[0].nbytes == infos[1].nbytes
        for start in range(0, infos[0].nbytes if same else 0, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, infos[0].nbytes)
            same = same and torch.equal(*(checkpoint.read_bytes(i, start, stop) for i in infos))
        if not same:
            raise CheckpointError(
                f"config.json ties the output head to {embedding}, and {head} is another matrix: "
                "set tie_word_embeddings to false, or remove the tensor."
            )


def _check_disk(plan: Plan, out: Path) -> None:
    """Before the folder is claimed, so that a refusal leaves nothing to resume."""
    written = sum(shard.size for shard in _published(plan, out))
    writer.check_disk(out, plan.output_bytes - written)


def _fingerprint(plan: Plan, device: str) -> dict[str, Any]:
    """What must not change between a run and its resumption.

    Quantising gives the same bits everywhere, the matrix products of a rotation do not.
    """
    rotated = any(member.edits for member in plan.members)
    checkpoint = plan.weights.checkpoint
    files = {}
    for file in checkpoint.metadata:
        status = (checkpoint.folder / file).stat()
        files[file] = [status.st_size, status.st_mtime_ns]
    tensors = [repr(info) for info in checkpoint.tensors.values()]
    content = json.dumps([files, tensors, checkpoint.config], sort_keys=True)
    return {
        "version": __version__,
        "recipe": plan.recipe.to_dict(),
        "source": hashlib.sha256(content.encode()).hexdigest(),
        "architecture spec": hashlib.sha256(plan.facts.spec_text.encode()).hexdigest(),
        "device": device if rotated else "any",
    }


def _work(plan: Plan, shards: ShardWriter, device: str) -> Iterator[Event]:
    """Every job with an unwritten tensor, the next one being read and the last ones written."""
    jobs = [job for job in plan.jobs if _wanted(job, shards)]
    total = plan.source_bytes
    done = total - sum(job.source_bytes for job in jobs)
    with single_threaded(1, "read") as read_pool, single_threaded(1, "write") as write_pool:
        ahead = read_pool.submit(_load, plan, jobs[0]) if jobs else None
        writing = _Queue(plan.queue_bytes)
        for number, job in enumerate(jobs):
            assert ahead is not None
            loaded = ahead.result()
            if number + 1 < len(jobs):
                ahead = read_pool.submit(_load, plan, jobs[number + 1])
            results, warnings = _compute(plan, job, loaded, device)
            writing.make_room(job.held_bytes)
            writing.append(write_pool.submit(_emit, plan, job, results, shards), job.held_bytes)
            done += job.source_bytes
            for message in warnings:
                yield Event("warning", message=message)
            yield Event("progress", done, total, job.stage)
        writing.make_room(plan.queue_bytes)


class _Queue:
    """Computed jobs on their way to the disk, in order, at most `limit` bytes of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._jobs: deque[tuple[Future[None], int]] = deque()

    def append(self, job: Future[None], nbytes: int) -> None:
        self._bytes += nbytes
        self._jobs.append((job, nbytes))

    def make_room(self, nbytes: int) -> None:
        """Wait until `nbytes` more fit; raises the first error of a job that has ended."""
        while self._jobs and (self._jobs[0][0].done() or self._bytes + nbytes > self._limit):
            job, size = self._jobs.popleft()
            job.result()
            self._bytes -= size


def _wanted(job: Job, shards: ShardWriter) -> bool:
    return any(shards.wants(output.name) for m in job.members for output in m.outputs)


def _load(plan: Plan, job: Job) -> list[_Result]:
    """The data of each member."""
    loaded: list[_Result] = []
    for member in job.members:
        if member.action == "repack":
            loaded.append(plan.weights.stored(member.module, plan.weights.activations))
        elif member.streamed:
            loaded.append(None)
        else:
            loaded.append(plan.weights.checkpoint.read(member.source.name))
    return loaded


def _compute(
    plan: Plan, job: Job, loaded: list[_Result], device: str
) -> tuple[list[_Result], list[str]]:
    """What is to be written of each member, and warnings."""
    if job.members[0].action == "quantize":
        tensors = [t.to(device) for t in loaded if isinstance(t, Tensor)]
        loaded.clear()  # so that each source is freed once it has been folded
        return _quantize(plan, job, tensors)
    read = plan.weights.checkpoint.read
    for i, member in enumerate(job.members):
        if isinstance(data := loaded[i], Tensor):
            edited = fold.apply(data.to(device), member.edits, read)
            loaded[i] = _rounded(edited, member, read)
    return loaded, []


def _quantize(plan: Plan, job: Job, tensors: list[Tensor]) -> tuple[list[_Result], list[str]]:
    """Fold and quantise the members of a group under one global scale."""
    read = plan.weights.checkpoint.read
    for i, member in enumerate(job.members):
        if member.edits:
            tensors[i] = fold.apply(tensors[i], member.edits, read)
        if tensors[i].dtype == torch.float64:
            tensors[i] = tensors[i].to(torch.float32)  # NVFP4 is computed in fp32
    maxima = [kernels.amax(tensor) for tensor in tensors]
    for member, maximum in zip(job.members, maxima, strict=True):
        if not math.isfinite(maximum):
            raise _misfit(member, torch.float32, read)
    group = max(maxima)
    scale = nvfp4.GlobalScale.from_amax(group)
    results: list[_Result] = []
    warnings = []
    for i, member in enumerate(job.members):
        if nvfp4.vanishes(maxima[i]):
            size = "holds only zeros" if maxima[i] == 0 else f"is at most {maxima[i]:.1e}"
            warnings.append(f"{member.name} {size}: it is stored as zeros.")
        if nvfp4.vanishes(group):
            results.append(Stored(nvfp4.zeros(*member.source.shape)))
        else:
            results.append(Stored(kernels.quantize(tensors[i], scale)))
    return results, warnings


def _rounded(edited: Tensor, member: Member, read: fold.Read) -> Tensor:
    """Round once to the stored dtype, refusing what does not fit it."""
    dtype = member.outputs[0].dtype
    rounded = edited.to(dtype)
    if not torch.isfinite(rounded).all():
        raise _misfit(member, dtype, read)
    return rounded


def _misfit(member: Member, dtype: torch.dtype, read: fold.Read) -> WeightError:
    """Why the member is not finite in `dtype`: what it is made from is not, or its range.

    The sources are read again: a rotation has spread a NaN over whole rows of the edited tensor.
    """
    sources = [member.source.name, *(name for edit in member.edits for name in edit.reads)]
    for name in sources:
        nvfp4.check_finite(read(name), name)
    name = str(dtype).removeprefix("torch.")
    remedy = (
        "store it wider with --dtype bfloat16 or float32"
        if dtype == torch.float16
        else "scale the weight down, or keep it as it is with --ignore and --rotate none"
    )
    return WeightError(f"{member.name} leaves the range of {name}: {remedy}.")


def _emit(plan: Plan, job: Job, results: list[_Result], shards: ShardWriter) -> None:
    for member, result in zip(job.members, results, strict=True):
        if not shards.wants(member.outputs[0].name):
            continue
        if isinstance(result, Stored):
            assert plan.layout is not None
            for name, tensor in plan.layout.export(member.module, result).items():
                shards.write(name, tensor)
        elif result is not None:
            shards.write(member.name, result)
        else:
            _stream(plan, member, shards)


def _stream(plan: Plan, member: Member, shards: ShardWriter) -> None:
    """Pass a tensor through in pieces: its bytes as they are, or row tiles of a row-local edit."""
    checkpoint, info = plan.weights.checkpoint, member.source
    if member.action == "copy":
        for start in range(0, info.nbytes, _PIECE_BYTES):
            data = checkpoint.read_bytes(info, start, min(start + _PIECE_BYTES, info.nbytes))
            if member.finite and not math.isfinite(nvfp4.amax(data.view(info.dtype))):
                nvfp4.check_finite(checkpoint.read(member.name), member.name)
            shards.write_bytes(member.name, start, data)
        return
    rows, columns = info.shape
    step = max(1, _TILE_VALUES // columns)
    row_bytes = columns * member.outputs[0].dtype.itemsize
    for start in range(0, rows, step):
        tile = checkpoint.read_rows(info.name, start, min(start + step, rows))
        edited = fold.apply(tile, member.edits, checkpoint.read)
        data = _rounded(edited, member, checkpoint.read).reshape(-1)
        shards.write_bytes(member.name, start * row_bytes, data)
