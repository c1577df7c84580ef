"""Carry out a plan: read, fold, quantise, repack, write, one job after the other.

While a job is computed the next one is read and the last one written, so memory holds two jobs at
most whatever the model's size. On a GPU the jobs go through `device` instead.
"""

import hashlib
import itertools
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from nvfp4cli import __version__, kernels
from nvfp4cli.calibrate.statistics import Statistics
from nvfp4cli.calibrate.text import Sequences
from nvfp4cli.checkpoint import writer
from nvfp4cli.checkpoint.files import INDEX, RECORD
from nvfp4cli.checkpoint.output import OutputFolder
from nvfp4cli.checkpoint.reader import sidecars
from nvfp4cli.checkpoint.writer import Shard, ShardWriter
from nvfp4cli.errors import CheckpointError, WeightError
from nvfp4cli.kernels.threads import single_threaded
from nvfp4cli.pipeline import compute, importance
from nvfp4cli.pipeline.calibrated import Layers
from nvfp4cli.pipeline.compute import Result, Work
from nvfp4cli.pipeline.device import computed, on_device
from nvfp4cli.pipeline.staging import Staging
from nvfp4cli.pipeline.writing import PIECE_BYTES, Queue, emit
from nvfp4cli.plan.record import Job, Plan


@dataclass(frozen=True)
class Event:
    """What the user sees: bytes of source done and in all, a warning, or how a GPU was used.

    computing, copying: shares of the time that the GPU spent on kernels and on copies to it, from
    the second job on, since the first compiles the kernels.
    """

    kind: Literal["progress", "warning", "summary"]
    done: int = 0
    total: int = 0
    stage: str = ""
    message: str = ""
    computing: float = 0.0
    copying: float = 0.0


def run(
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    device: str = "cpu",
    shown: Sequences | Statistics | None = None,
) -> Iterator[Event]:
    """Write the checkpoint of `plan` into the folder `out`.

    shown: the text that the recipe's method needs, or what an earlier run has made of one.

    resume: continue a killed run, refused unless source, recipe and version are the same; the
    bytes are those of an uninterrupted run. device: where weights are folded and quantised; "cpu"
    does it where they are read, to any other torch device they are copied and back.

    A weight that cannot be quantised leaves no output. Any other interruption leaves the complete
    shards for `resume`.
    """
    source = plan.source.checkpoint.folder
    _check_disk(plan, out)
    _check_copies(plan)
    fingerprint = _fingerprint(plan, device, shown)
    with OutputFolder(out, source, fingerprint, resume) as folder:
        try:
            yield from _write(plan, out, device, shown)
        except WeightError:
            folder.discard(_files(plan))
            raise
        except OSError as error:
            raise CheckpointError(
                f"The run into {out} stopped ({error.strerror or error}): mend the cause and "
                "continue with --resume."
            ) from error
        folder.finish()


def _write(
    plan: Plan, out: Path, device: str, shown: Sequences | Statistics | None
) -> Iterator[Event]:
    """Shards, then sidecars, then what makes the folder loadable: config.json and the index."""
    source = plan.source.checkpoint.folder
    done = [shard.file for shard in _published(plan, out)]
    shards = writer.ShardWriter(out, plan.shards, done)
    try:
        yield from _work(plan, shards, device, shown)
    finally:
        shards.close()
    for name in sidecars(source):
        writer.copy_file(source / name, out / name)
    files = plan.files
    if shown is not None:
        record = yaml.safe_load(files[RECORD]) | {"calibration": shown.facts}
        files = files | {RECORD: yaml.safe_dump(record, sort_keys=False)}
    for name, data in plan.binary.items():
        writer.write_bytes(out / name, data)
    for name, text in sorted(files.items(), key=lambda item: item[0] == "config.json"):
        writer.write_bytes(out / name, text.encode())
    writer.write_index(out, plan.shards)


def _files(plan: Plan) -> list[str]:
    """Every file of the output."""
    source = plan.source.checkpoint.folder
    shards = (shard.file for shard in plan.shards)
    return [*shards, INDEX, *plan.files, *plan.binary, *sidecars(source)]


def _published(plan: Plan, out: Path) -> list[Shard]:
    """Shards that an earlier run has completed."""
    paths = [(shard, out / shard.file) for shard in plan.shards]
    return [shard for shard, path in paths if path.exists() and path.stat().st_size == shard.size]


def _check_copies(plan: Plan) -> None:
    """A stored head that config.json calls tied is left out; it must say the same."""
    checkpoint = plan.source.checkpoint
    for head, embedding in plan.facts.copies:
        infos = [checkpoint.tensors[name] for name in (head, embedding)]
        same = infos[0].nbytes == infos[1].nbytes
        for start in range(0, infos[0].nbytes if same else 0, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, infos[0].nbytes)
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


def _fingerprint(plan: Plan, device: str, shown: Sequences | Statistics | None) -> dict[str, Any]:
    """What must not change between a run and its resumption.

    Quantising gives the same bits everywhere, the matrix products of a rotation or of calibration
    do not.
    """
    products = isinstance(shown, Sequences) or any(member.edits for member in plan.members)
    checkpoint = plan.source.checkpoint
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
        "calibration": shown.facts if shown is not None else {},
        "device": device if products else "any",
    }


def _work(
    plan: Plan, shards: ShardWriter, device: str, shown: Sequences | Statistics | None
) -> Iterator[Event]:
    """Every job with an unwritten tensor, in order."""
    if isinstance(shown, Sequences):
        yield from _told(plan, plan.jobs, _by_layers(plan, shards, device, shown))
        return
    jobs = [job for job in plan.jobs if _wanted(job, shards)]
    widths = [len(job.members) for job in jobs if computed(job)]
    if device == "cpu" or not widths:
        yield from _told(plan, jobs, _on_host(plan, jobs, shards, shown))
        return
    with Staging(torch.device(device), max(widths)) as staging:
        yield from _told(plan, jobs, on_device(plan, jobs, shards, staging, shown))
        computing, copying = staging.shares()
    if computing:
        yield Event("summary", computing=computing, copying=copying)


def _told(plan: Plan, jobs: Sequence[Job], work: Work) -> Iterator[Event]:
    """Warnings and progress of the jobs that are carried out."""
    total = plan.source_bytes
    done = total - sum(job.source_bytes for job in jobs)
    with closing(work):
        for job, warnings in work:
            done += job.source_bytes
            for message in warnings:
                yield Event("warning", message=message)
            yield Event("progress", done, total, job.stage)


def _on_host(
    plan: Plan, jobs: Sequence[Job], shards: ShardWriter, statistics: Statistics | None
) -> Work:
    """Carry out jobs, the next one being read and the last ones written."""
    with single_threaded(1, "read") as read_pool, single_threaded(1, "write") as write_pool:
        ahead = read_pool.submit(_load, plan, jobs[0]) if jobs else None
        writing = Queue(plan.queue_bytes)
        for number, job in enumerate(jobs):
            assert ahead is not None
            loaded = ahead.result()
            if number + 1 < len(jobs):
                ahead = read_pool.submit(_load, plan, jobs[number + 1])
            results, warnings = _compute(plan, job, loaded, statistics)
            writing.make_room(job.held_bytes)
            writing.append(write_pool.submit(emit, plan, job, results, shards), job.held_bytes)
            yield job, warnings
        writing.drain()


def measure(plan: Plan, text: Sequences, device: str) -> Generator[Event, None, Statistics]:
    """What the quantised model of a plan makes of a text, without a checkpoint being written."""
    layers = Layers(plan, text, torch.device(device))
    done = 0
    for stage, group in itertools.groupby(plan.jobs, key=lambda job: job.stage):
        jobs = list(group)
        for _, warnings in layers.work(stage, jobs).values():
            for message in warnings:
                yield Event("warning", message=message)
        done += sum(job.source_bytes for job in jobs)
        yield Event("progress", done, plan.source_bytes, stage)
    return layers.statistics


def _by_layers(plan: Plan, shards: ShardWriter, device: str, text: Sequences) -> Work:
    """Carry out jobs in order, those of a decoder layer together.

    Also those that are on the disk already: what follows them depends on them.
    """
    layers = Layers(plan, text, torch.device(device))
    for stage, group in itertools.groupby(plan.jobs, key=lambda job: job.stage):
        jobs = list(group)
        found = layers.work(stage, jobs)
        for place, job in enumerate(jobs):
            computed, warnings = found.get(place) or _compute(plan, job, _load(plan, job), None)
            emit(plan, job, computed, shards)
            yield job, warnings


def _wanted(job: Job, shards: ShardWriter) -> bool:
    return any(shards.wants(output.name) for m in job.members for output in m.outputs)


def _load(plan: Plan, job: Job) -> list[Result]:
    """The data of each member; members that lie in one expert's matrix share it."""
    loaded: list[Result] = []
    experts: dict[tuple[str, int], Tensor] = {}
    for member in job.members:
        if member.action == "repack":
            loaded.append(plan.weights.stored(member.module, plan.weights.activations))
        elif member.action == "repack_fp8":
            loaded.append(plan.weights.stored_fp8(member.module))
        elif member.action == "recache":
            loaded.append(plan.weights.cache_scales(member.module))
        elif member.streamed or member.action == "cache":
            loaded.append(None)
        elif member.piece and member.piece.expert is not None:
            place = member.source.name, member.piece.expert
            if place not in experts:
                experts[place] = compute.stored(member, plan.source)
            loaded.append(experts[place])
        else:
            loaded.append(plan.source.read(member.source.name))
    return loaded


def _compute(
    plan: Plan, job: Job, loaded: list[Result], statistics: Statistics | None
) -> tuple[list[Result], list[str]]:
    """What is to be written of each member, and warnings."""
    read = plan.source.read
    if job.members[0].action == "quantize":
        tensors = [data for data in loaded if isinstance(data, Tensor)]
        loaded.clear()  # so that each source is freed once it has been folded
        for i, member in enumerate(job.members):
            tensors[i] = compute.encodable(compute.edited(member, tensors[i], read))
        maxima = [kernels.amax(tensor) for tensor in tensors]
        compute.check_maxima(job, maxima, read)
        estimate = importance.estimate(plan, job.members[0])
        return compute.quantized(job, tensors, maxima, plan.recipe, statistics, estimate)
    if job.members[0].action == "cache":
        form = plan.recipe.kv_cache
        return [compute.cache_scales(job.members[0].module, statistics, form)], []
    for i, member in enumerate(job.members):
        if isinstance(data := loaded[i], Tensor):
            edited = compute.edited(member, data, read)
            loaded[i] = compute.rounded(edited, member, read).contiguous()
    return loaded, []
