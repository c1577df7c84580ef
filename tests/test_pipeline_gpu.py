"""The way of a GPU: on the CPU with copies done late, and, marked `gpu`, on one."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import contents, quantize
from late import STAGED, shrink, stage
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli import kernels, pipeline
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.checkpoint.writer import Shard, ShardWriter
from nvfp4cli.cli import quantizing
from nvfp4cli.cli.app import main
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.kernels.threads import single_threaded
from nvfp4cli.layouts import LAYOUTS, open_weights
from nvfp4cli.pipeline import staging, writing
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", vocab=264)


class Stop(BaseException):
    """Stands for a kill: nothing may catch it."""


def plan_for(model: Path, **recipe: object) -> Plan:
    return plan_quantize(
        open_checkpoint(model), Recipe(**recipe), model="m", arch_spec=None, strict=False
    )


def run(model: Path, out: Path, *options: str) -> int:
    """Exit code of `nvfp4 quantize` on the GPU."""
    return main(["quantize", str(model), str(out), "--device", "cuda", *options])


def damaged(model: Path, folder: Path) -> Path:
    """A copy of a single-file checkpoint with a NaN at [5, 7] of the weight Q."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    tensors[Q][5, 7] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_same_fold(out: Path, expected: Path) -> None:
    """Two folds that differ by how their products were rounded in fp32.

    A kept weight may be off by a unit in the last place of bf16, and one near zero by the rounding
    of a row's sum. A quantised one whose fold lies at a midpoint of E2M1 may go to either side.
    """
    a, b = (open_weights(open_checkpoint(folder)) for folder in (out, expected))
    assert a.names == b.names
    for name in a.names:
        x, y = a.tensor(name).double(), b.tensor(name).double()
        changed = (x - y).abs() > 2**-7 * y.abs() + 1e-6 * y.abs().max()
        module = name.removesuffix(".weight")
        assert changed.double().mean() <= (0.01 if module in b.quantized else 0)


def assert_resumed(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A run that dies after its first file and goes on gives the bytes of a whole run."""
    plan, publish = plan_for(model, max_shard_size="37KB"), ShardWriter._publish

    def stopping(self: ShardWriter, shard: Shard) -> None:
        publish(self, shard)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_publish", stopping)
        with pytest.raises(Stop):
            list(pipeline.run(plan, folder / "out", device=place))
    assert not (folder / "out" / "config.json").exists()
    list(pipeline.run(plan, folder / "out", device=place, resume=True))
    list(pipeline.run(plan, folder / "whole"))
    assert contents(folder / "out") == contents(folder / "whole")


# On the CPU, with copies done late


@pytest.mark.parametrize("layout", LAYOUTS)
def test_staged_bytes_are_those_of_the_host(layout, llama, tmp_path, monkeypatch):
    options = ("--layout", layout, "--dtype", "float16")
    assert quantize(llama, tmp_path / "host", *options) == 0
    stage(monkeypatch)
    assert quantize(llama, tmp_path / "staged", *options) == 0
    assert contents(tmp_path / "staged") == contents(tmp_path / "host")


@pytest.mark.parametrize("scheme", ["none", "w4a16"])
def test_staged_folds_are_those_of_the_host(scheme, llama, tmp_path, monkeypatch):
    """The embedding and the head pass in tiles of rows, whose products may round otherwise."""
    options = ("--rotate", "r1r2", "--scheme", scheme)
    assert quantize(llama, tmp_path / "host", *options) == 0
    stage(monkeypatch)
    assert quantize(llama, tmp_path / "staged", *options) == 0
    assert_same_fold(tmp_path / "staged", tmp_path / "host")


def test_a_staged_run_is_resumed(llama, tmp_path, monkeypatch):
    shrink(monkeypatch)
    assert_resumed(llama, tmp_path, monkeypatch, STAGED)


def test_a_full_disk_ends_a_staged_run(llama, tmp_path, monkeypatch, capsys):
    stage(monkeypatch)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert quantize(llama, tmp_path / "out") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert quantize(llama, tmp_path / "out", "--resume") == 0


@pytest.mark.parametrize(
    ("rotate", "step"),
    [("none", "continue with --device cpu --resume."), ("r1", "another folder with --device cpu.")],
)
def test_too_little_memory_on_the_device(rotate, step, llama, tmp_path, monkeypatch, capsys):
    stage(monkeypatch)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "quantize", full)
        assert quantize(llama, tmp_path / "out", "--rotate", rotate) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: The GPU has too little free memory for model.layers.0")
    assert message.endswith(step)
    assert quantize(llama, tmp_path / "out", "--rotate", rotate, "--resume") == 0


@pytest.mark.parametrize(
    ("computing", "copying", "limit"),
    [(0.95, 0.3, "it is"), (0.31, 0.9, "copying"), (0.31, 0.2, "reading and writing the files is")],
)
def test_what_held_a_run_up_is_said(
    computing, copying, limit, llama, tmp_path, capsys, monkeypatch
):
    shares = (computing, copying)
    monkeypatch.setattr(staging.Staging, "shares", lambda _: shares)
    monkeypatch.setattr(quantizing, "pick", lambda _: STAGED)
    assert quantize(llama, tmp_path / "out") == 0
    sentence = capsys.readouterr().out.splitlines()[1]
    assert sentence.startswith(f"The GPU was busy {100 * computing:.0f} % of the time: {limit}")


@pytest.mark.parametrize("sizes", [[], [0], [1], [10], [3, 7], [25], [4, 0, 30, 6, 1], [9, 2, 9]])
def test_every_byte_has_one_place(sizes):
    buffers = list(staging.deal(sizes, 10))
    for parts in buffers:
        ends = [part.place + part.stop - part.start for part in parts]
        assert [part.place for part in parts] == [0, *ends[:-1]]
        assert ends[-1] == 10 or parts is buffers[-1]
    places = [
        (p.index, byte) for parts in buffers for p in parts for byte in range(p.start, p.stop)
    ]
    assert places == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]


def test_the_allocator_is_told_who_uses_a_tensor(monkeypatch):
    """A block freed by the host may still be read by a lane other than the one that made it."""
    used: dict[staging.Lane, set[int]] = {}

    def uses(self: staging.Lane, tensor: Tensor) -> None:
        used.setdefault(self, set()).add(tensor.data_ptr())

    monkeypatch.setattr(staging.Lane, "uses", uses)
    with staging.Staging(torch.device("cpu"), 1) as lanes:
        loaded = lanes.load([5, 7], lambda index, start, target: target.fill_(index))
        results = [torch.ones(3), torch.ones(2, 2)]
        for cargo in lanes.send(results):
            cargo.deliver(lambda *_: None)
        assert used[lanes._kernels] == {tensor.data_ptr() for tensor in loaded.tensors}
        assert used[lanes._outward] == {tensor.data_ptr() for tensor in results}


def test_pinned_memory_is_within_the_plan(llama):
    """Beside the pool a run on a GPU holds a piece that is read and one that is passed through."""
    held = staging.PINNED_BYTES + staging.PIECE_BYTES + writing.PIECE_BYTES
    assert held <= plan_for(llama).memory_bytes


@pytest.mark.parametrize("status", [0, 2])
def test_memory_that_cannot_be_pinned(status, monkeypatch):
    """The CUDA runtime's part is played: it pins, or says that the limit is reached."""
    pinned: list[tuple[int, int]] = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            pinned.append((address, nbytes))
            return status

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            pinned[:] = [entry for entry in pinned if entry[0] != address]
            return 0

        @staticmethod
        def cudaGetErrorString(status: int) -> str:
            return "out of memory"

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    if status:
        sentence = r"3 MiB of host memory cannot be pinned .*out of memory.* use --device cpu\.$"
        with pytest.raises(UnsupportedError, match=sentence):
            staging.HostMemory(3 << 20, torch.device("cuda"))
        return
    memory = staging.HostMemory(3 << 20, torch.device("cuda"))
    assert pinned == [(memory.tensor.data_ptr(), 3 << 20)]
    memory.close()
    assert not pinned


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("small", [False, True], ids=["pieces", "small-pieces"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_bytes_are_those_of_the_cpu(layout, small, llama, tmp_path, monkeypatch):
    options = ("--layout", layout, "--dtype", "float16")
    assert quantize(llama, tmp_path / "cpu", *options) == 0
    if small:
        shrink(monkeypatch)
    assert run(llama, tmp_path / "gpu", *options) == 0
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_gpu_bytes_of_other_sources(dtype, tiny_model, tmp_path):
    model = tiny_model("llama", vocab=264, dtype=dtype)
    assert quantize(model, tmp_path / "cpu") == 0
    assert run(model, tmp_path / "gpu") == 0
    assert contents(tmp_path / "gpu") == contents(tmp_path / "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["none", "w4a16"])
def test_gpu_folds_are_those_of_the_cpu(scheme, llama, tmp_path, monkeypatch):
    options = ("--rotate", "r1r2", "--scheme", scheme)
    assert quantize(llama, tmp_path / "cpu", *options) == 0
    shrink(monkeypatch)
    assert run(llama, tmp_path / "gpu", *options) == 0
    assert_same_fold(tmp_path / "gpu", tmp_path / "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rotate", ["none", "r1r2"])
def test_gpu_refuses_nan_in_the_same_words(rotate, llama, tmp_path, capsys):
    model = damaged(llama, tmp_path / "model")
    messages = []
    for command in (quantize, run):
        assert command(model, tmp_path / "out", "--rotate", rotate) == 1
        messages.append(capsys.readouterr().err.splitlines()[-1])
        assert not (tmp_path / "out").exists()
    assert messages[0].startswith(f"error: {Q} holds 1 value that is NaN or Inf")
    assert messages[1] == messages[0]


@pytest.mark.gpu
def test_gpu_runs_are_resumed(llama, tmp_path, monkeypatch):
    assert_resumed(llama, tmp_path, monkeypatch, "cuda")


@pytest.mark.gpu
def test_gpu_without_memory(llama, tmp_path, capsys):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        assert run(llama, tmp_path / "out") == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: The GPU has too little free memory for model.layers.0")
    assert quantize(llama, tmp_path / "out", "--resume") == 0


@pytest.mark.gpu
def test_gpu_events_end_with_how_busy_it_was(llama, tmp_path):
    events = list(pipeline.run(plan_for(llama), tmp_path / "out", device="cuda"))
    assert events[-1].kind == "summary"
    assert 0 < events[-1].computing < 1
    assert 0 < events[-1].copying < 1


@pytest.mark.gpu
def test_pinned_memory_ends_with_the_run():
    memory = staging.HostMemory(1 << 20, torch.device("cuda"))
    assert memory.tensor.is_pinned()
    memory.close()
    assert not memory.tensor.is_pinned()


@pytest.mark.gpu
def test_no_byte_is_lost_between_the_lanes():
    """Blocks and buffers are reused at once by the next turn, while lanes still work on the last.

    Each turn is slowed where copies could overtake it: 40 passes over the tensor before its bytes
    are taken, and no wait of the host in between.
    """
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(0, 256, (20 << 20,), generator=generator).byte() for _ in range(3)]
    returned = [torch.zeros_like(source) for source in sources * 4]
    with (
        staging.Staging(torch.device("cuda"), 1) as lanes,
        single_threaded(1, "write") as write_pool,
    ):
        for source, target in zip(sources * 4, returned, strict=True):

            def read(_: int, start: int, piece: Tensor, source: Tensor = source) -> None:
                piece.copy_(source[start : start + len(piece)])

            def write(_: int, start: int, piece: Tensor, target: Tensor = target) -> None:
                target[start : start + len(piece)] = piece

            loaded = lanes.load([source.nbytes], read)
            with lanes.computing(loaded):
                result = loaded.tensors.pop()
                for _ in range(41):
                    result = 255 - result
            del loaded
            for cargo in lanes.send([result]):
                write_pool.submit(cargo.deliver, write)
            del result
    for source, target in zip(sources * 4, returned, strict=True):
        assert torch.equal(target, 255 - source)
