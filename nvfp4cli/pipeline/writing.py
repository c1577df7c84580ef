"""Results on their way to the disk."""

import math
from collections import deque
from concurrent.futures import Future

from torch import Tensor

from nvfp4cli.checkpoint.writer import ShardWriter
from nvfp4cli.formats import nvfp4
from nvfp4cli.layouts.record import CacheScales, Stored, StoredFp8
from nvfp4cli.pipeline.compute import Result, edited, rounded
from nvfp4cli.plan.record import Job, Member, Plan

# Kept tensors pass through in pieces of this size.
PIECE_BYTES = 16 << 20
# Edited ones do in tiles of rows: smaller, because a fold holds about six of them in fp32 at once.
_TILE_VALUES = 1 << 20


class Queue:
    """Computed jobs on their way to the disk, in order, at most `limit` bytes of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._jobs: deque[tuple[Future[None], int]] = deque()

    def append(self, job: Future[None], nbytes: int) -> None:
        """Add a job whose results hold `nbytes` until it has ended."""
        self._bytes += nbytes
        self._jobs.append((job, nbytes))

    def make_room(self, nbytes: int) -> None:
        """Wait until `nbytes` more fit; raises the first error of a job that has ended."""
        while self._jobs and (self._jobs[0][0].done() or self._bytes + nbytes > self._limit):
            self._wait_for_first()

    def drain(self) -> None:
        """Wait for all jobs; raises the first error of one."""
        while self._jobs:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        job, size = self._jobs.popleft()
        job.result()
        self._bytes -= size


def emit(plan: Plan, job: Job, results: list[Result], shards: ShardWriter) -> None:
    """Write what has become of the members and is not on disk already."""
    for member, result in zip(job.members, results, strict=True):
        if not shards.wants(member.outputs[0].name):
            continue
        if result is None:
            _stream(plan, member, shards)
        else:
            for name, tensor in exported(plan, member, result).items():
                shards.write(name, tensor)


def exported(
    plan: Plan, member: Member, result: Stored | StoredFp8 | CacheScales | Tensor
) -> dict[str, Tensor]:
    """The tensors to write of a member."""
    if isinstance(result, Tensor):
        return {member.name: result}
    assert plan.layout is not None
    if isinstance(result, CacheScales):
        return plan.layout.cache_export(member.module, result)
    if isinstance(result, StoredFp8):
        return plan.layout.fp8_export(member.module, result)
    return plan.layout.export(member.module, result)


def _stream(plan: Plan, member: Member, shards: ShardWriter) -> None:
    """Pass a tensor through in pieces: its bytes as they are, tiles of its rows, or experts."""
    source, info = plan.source, member.source
    if member.action == "copy":
        stored = source.checkpoint.tensors[info.name]
        for start in range(0, info.nbytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, info.nbytes)
            data = source.checkpoint.read_bytes(stored, start, stop)
            if member.finite and not math.isfinite(nvfp4.amax(data.view(info.dtype))):
                nvfp4.check_finite(source.read(info.name), member.name)
            shards.write_bytes(member.name, start, data)
        return
    rows, columns = info.shape[0], math.prod(info.shape[1:])
    step = max(1, _TILE_VALUES // columns)
    row_bytes = columns * member.outputs[0].dtype.itemsize
    for start in range(0, rows, step):
        tile = source.read_rows(info.name, start, min(start + step, rows))
        result = edited(member, tile, source.read)
        data = rounded(result, member, source.read).reshape(-1)
        shards.write_bytes(member.name, start * row_bytes, data)
