"""The way of a GPU on a CPU: copies as late as a GPU may do them, in pieces as small as can be."""

import threading

import pytest
import torch
from torch import Tensor

from nvfp4cli.cli import quantizing
from nvfp4cli.pipeline import device, staging

STAGED = "cpu:0"  # not "cpu", and so a device that jobs are copied to and from


class LateLane(staging.Lane):
    """A lane that copies nothing before somebody waits for a mark behind it, as a GPU may."""

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.done = 0
        self.lock = threading.Lock()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies.append((target, source))

    def mark(self) -> "LateMark":
        return LateMark(self)

    def after(self, mark: staging.Mark) -> None:
        mark.wait()

    def finish(self) -> None:
        self.mark().wait()


class LateMark(staging.Mark):
    def __init__(self, lane: LateLane) -> None:
        super().__init__(None)
        self.lane, self.position = lane, len(lane.copies)

    def wait(self) -> None:
        with self.lane.lock:
            for target, source in self.lane.copies[self.lane.done : self.position]:
                target.copy_(source)
            self.lane.done = max(self.lane.done, self.position)

    def passed(self) -> bool:
        return self.lane.done >= self.position


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make groups larger than the pool, and let tensors begin and end anywhere in a buffer."""
    monkeypatch.setattr(staging, "PIECE_BYTES", 1000)
    monkeypatch.setattr(staging, "PINNED_BYTES", 12_000)
    monkeypatch.setattr(device, "TILE_BYTES", 5000)


def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands go the way of a GPU on the CPU, whatever their --device."""
    shrink(monkeypatch)
    monkeypatch.setattr(quantizing, "pick", lambda _: STAGED)
    monkeypatch.setattr(staging, "Lane", LateLane)
