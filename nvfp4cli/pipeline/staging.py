"""Copies between the host and a GPU that run beside the GPU's kernels.

A `Staging` has three lanes that work at the same time: copies to the device, kernels, copies back.
The host enqueues and goes on; one lane waits for another on the device. The host itself waits in
three places only: for a buffer to come free, for a few numbers that decide what is done next, and,
in the thread that writes, for the bytes to write.

Copies run beside kernels only from and to pinned memory, of which there are `PINNED_BYTES` for the
time of a run: tensors pass through in pieces. On a CPU device the same code runs without streams,
everything being done by the time it has been asked for.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from nvfp4cli.errors import UnsupportedError

# At the 55 GB/s of PCIe 5 a copy of 8 MiB takes 0.15 ms, long enough to hide what its launch costs.
PIECE_BYTES = 8 << 20
_INWARD_BUFFERS = 4
_OUTWARD_BUFFERS = 8  # what may wait to be written: the results of 240 MB of bf16
PINNED_BYTES = PIECE_BYTES * (_INWARD_BUFFERS + _OUTWARD_BUFFERS)

_FETCHES = 2  # `Numbers` that may be on their way at once


class Mark:
    """A point in a lane, passed once all that was enqueued before it is done."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if stream is not None:
            # A blocking event leaves the core to the other threads; by default waiting spins.
            self.event = torch.cuda.Event(enable_timing=True, blocking=True)
            self.event.record(stream)

    def wait(self) -> None:
        """Hold the calling thread until the mark has been passed."""
        if self.event is not None:
            self.event.synchronize()

    def passed(self) -> bool:
        """Whether it has been passed, without waiting."""
        return self.event is None or self.event.query()

    def seconds_since(self, earlier: "Mark") -> float:
        """Time on the device between two marks that have been passed."""
        if self.event is None or earlier.event is None:
            return self._time - earlier._time
        return earlier.event.elapsed_time(self.event) / 1000


class Lane:
    """Work in order: a CUDA stream of its own, or the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def active(self) -> AbstractContextManager[object]:
        """Where the calling thread's operations go to this lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """The present end of the lane."""
        return Mark(self._stream)

    def after(self, mark: Mark) -> None:
        """Let what is enqueued from now on wait, on the device, until `mark` has been passed."""
        if self._stream is not None and mark.event is not None:
            self._stream.wait_event(mark.event)

    def uses(self, tensor: Tensor) -> None:
        """Keep the allocator from reusing another lane's tensor before this lane is done with it.

        That holds for what has been enqueued by the time the tensor is freed.
        """
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy. The host's side of it must stay as it is until a later mark is passed."""
        with self.active():
            target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Wait until the lane is empty."""
        if self._stream is not None:
            self._stream.synchronize()


class HostMemory:
    """uint8 [nbytes] on the host, pinned for a CUDA device until it is closed.

    Not torch's `pin_memory`, whose allocator keeps memory pinned until the process ends.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises UnsupportedError where the system refuses to pin so much."""
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        self._pinned = device.type == "cuda"
        if self._pinned:
            cudart = torch.cuda.cudart()
            status = cudart.cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)
            if int(status):
                raise UnsupportedError(
                    f"{nbytes >> 20} MiB of host memory cannot be pinned for the GPU "
                    f"({cudart.cudaGetErrorString(status)}): raise the limit of locked memory, or "
                    "use --device cpu."
                )

    def close(self) -> None:
        """Unpin it. No copy may be using it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


class Pool:
    """Buffers, each handed out again only once the last copy from or to it is done."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._free: SimpleQueue[tuple[Tensor, Mark | None]] = SimpleQueue()
        for buffer in buffers:
            self.give(buffer, None)

    def take(self) -> Tensor:
        """The buffer given back longest ago; waits for it if need be."""
        buffer, mark = self._free.get()
        if mark is not None:
            mark.wait()
        return buffer

    def give(self, buffer: Tensor, mark: Mark | None) -> None:
        """Give a buffer back, with the mark behind the copies that still use it."""
        self._free.put((buffer, mark))


@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of tensor number `index`, lying at `place` of a buffer."""

    index: int
    start: int
    stop: int
    place: int

    def of(self, buffer: Tensor) -> Tensor:
        """The part where it lies in the buffer."""
        return buffer[self.place : self.place + self.stop - self.start]


def deal(sizes: Sequence[int], capacity: int) -> Iterator[list[Part]]:
    """Lay tensors of `sizes` bytes one behind the other into buffers of `capacity` bytes."""
    parts: list[Part] = []
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + capacity - used)
            parts.append(Part(index, start, stop, used))
            used += stop - start
            start = stop
            if used == capacity:
                yield parts
                parts, used = [], 0
    if parts:
        yield parts


@dataclass(frozen=True)
class Loaded:
    """Tensors as uint8 [nbytes] on the device, there once `ready` has been passed."""

    tensors: list[Tensor]
    ready: Mark


@dataclass(frozen=True)
class Cargo:
    """A buffer of results, there once `ready` has been passed."""

    parts: list[Part]
    buffer: Tensor
    ready: Mark
    pool: Pool

    def deliver(self, write: Callable[[int, int, Tensor], None]) -> None:
        """Call write(index, start, bytes) for each part, then give the buffer back."""
        try:
            self.ready.wait()
            for part in self.parts:
                write(part.index, part.start, part.of(self.buffer))
        finally:
            self.pool.give(self.buffer, None)


@dataclass(frozen=True)
class Numbers:
    """A few values on their way to the host."""

    count: int
    buffer: Tensor
    ready: Mark
    pool: Pool

    def take(self) -> list[float]:
        """The values, waited for. Once only."""
        self.ready.wait()
        values = self.buffer.view(torch.float64)[: self.count].tolist()
        self.pool.give(self.buffer, None)
        return values


class Stopwatch:
    """Seconds between pairs of marks of one lane, added up without waiting for it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds = 0.0
        self._laps: deque[tuple[Mark, Mark]] = deque()

    def lap(self, begun: Mark, ended: Mark) -> None:
        """Add a stretch of work."""
        self._laps.append((begun, ended))
        self._add_passed()

    def share(self) -> float:
        """Of the time since the stopwatch was made, the part within laps that have ended."""
        self._add_passed()
        return self._seconds / (time.perf_counter() - self._began)

    def _add_passed(self) -> None:
        while self._laps and self._laps[0][1].passed():
            begun, ended = self._laps.popleft()
            self._seconds += ended.seconds_since(begun)


class Staging:
    """The lanes, the buffers between them and their times. A context: pinned memory ends with it.

    One thread may call `load`, another one the rest, any thread `Cargo.deliver`.
    """

    def __init__(self, device: torch.device, most_numbers: int) -> None:
        """most_numbers: the most values that `fetch` is asked for at once."""
        self._device = device
        pieces, width = PINNED_BYTES, most_numbers * torch.float64.itemsize
        self._memory = HostMemory(pieces + _FETCHES * width, device)
        buffers = self._memory.tensor[:pieces].split(PIECE_BYTES)
        self._in, self._out = Pool(buffers[:_INWARD_BUFFERS]), Pool(buffers[_INWARD_BUFFERS:])
        self._few = Pool(self._memory.tensor[pieces:].split(width))
        self._inward, self._kernels, self._outward = (Lane(device) for _ in range(3))
        self.restart_clock()

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, *_: object) -> None:
        for lane in (self._inward, self._kernels, self._outward):
            lane.finish()
        self._memory.close()

    def load(self, sizes: Sequence[int], read: Callable[[int, int, Tensor], None]) -> Loaded:
        """Copy tensors of `sizes` bytes to the device, the next piece being read meanwhile.

        read(index, start, target) fills target with bytes [start, start + len(target)) of a tensor.
        """
        with self._inward.active():
            tensors = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]
        for parts in deal(sizes, PIECE_BYTES):
            buffer = self._in.take()
            for part in parts:
                read(part.index, part.start, part.of(buffer))
            begun = self._inward.mark()
            for part in parts:
                self._inward.copy(tensors[part.index][part.start : part.stop], part.of(buffer))
            ended = self._inward.mark()
            self._in.give(buffer, ended)
            self._copy_time.lap(begun, ended)
        for tensor in tensors:
            self._kernels.uses(tensor)
        return Loaded(tensors, self._inward.mark())

    @contextmanager
    def computing(self, loaded: Loaded | None = None) -> Iterator[None]:
        """Where the calling thread's operations go to the lane of the kernels, and are timed.

        The lane waits, untimed, for what has been loaded.
        """
        if loaded is not None:
            self._kernels.after(loaded.ready)
        begun = self._kernels.mark()
        with self._kernels.active():
            yield
        self._kernel_time.lap(begun, self._kernels.mark())

    def fetch(self, values: Tensor) -> Numbers:
        """Send a few values, [count] fp32 or fp64 made by the kernels' lane, to the host."""
        buffer = self._few.take()
        with self._kernels.active():
            wide = values.double()
        self._kernels.copy(buffer.view(torch.float64)[: len(values)], wide)
        return Numbers(len(values), buffer, self._kernels.mark(), self._few)

    def send(self, tensors: Sequence[Tensor]) -> Iterator[Cargo]:
        """Bring contiguous tensors, made by the kernels' lane or on the host, back in order.

        Waits for the oldest buffer to be delivered where none is free.
        """
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        for tensor in flat:
            self._outward.uses(tensor)
        self._outward.after(self._kernels.mark())
        for parts in deal([tensor.nbytes for tensor in flat], PIECE_BYTES):
            buffer = self._out.take()
            for part in parts:
                self._outward.copy(part.of(buffer), flat[part.index][part.start : part.stop])
            yield Cargo(parts, buffer, self._outward.mark(), self._out)

    def restart_clock(self) -> None:
        """Begin to measure anew."""
        self._kernel_time, self._copy_time = Stopwatch(), Stopwatch()

    def shares(self) -> tuple[float, float]:
        """Of the time measured, what was spent on kernels and on copies to the device.

        The gaps between the kernels of one `computing` count as kernels.
        """
        return self._kernel_time.share(), self._copy_time.share()
