"""Runs that are killed, refused, short of disk or short of memory."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import contents, quantize
from safetensors.torch import load_file, save_file

from nvfp4cli import pipeline
from nvfp4cli.checkpoint.output import JOURNAL
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.checkpoint.writer import ShardWriter
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.recipe import Recipe


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", vocab=264)


class Stop(BaseException):
    """Stands for a kill: nothing may catch it."""


@pytest.fixture
def stops_after_one(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Runs stop as soon as the first file is complete; `undo()` the result to let them finish."""
    publish = ShardWriter._publish

    def stopping(self: ShardWriter, shard: object) -> None:
        publish(self, shard)
        raise Stop

    monkeypatch.setattr(ShardWriter, "_publish", stopping)
    return monkeypatch


OPTIONS = ("--max-shard-size", "20KB", "--rotate", "r1")
KILLED = """
import os, signal, sys
from nvfp4cli.checkpoint.writer import ShardWriter
from nvfp4cli.cli.app import main

publish = ShardWriter._publish

def killing(self, shard):
    publish(self, shard)
    os.kill(os.getpid(), signal.SIGKILL)

ShardWriter._publish = killing
main(sys.argv[1:])
"""


def test_killed_and_resumed_is_uninterrupted(tiny_model, tmp_path):
    model, whole, out = tiny_model("llama", vocab=264, shards=3), tmp_path / "a", tmp_path / "b"
    assert quantize(model, whole, *OPTIONS) == 0
    argv = ["quantize", str(model), str(out), "--device", "cpu", *OPTIONS]
    killed = subprocess.run([sys.executable, "-c", KILLED, *argv], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = contents(out)
    complete = [name for name in left if name.endswith(".safetensors")]
    assert len(complete) == 1
    assert left[complete[0]] == (whole / complete[0]).read_bytes()
    assert "config.json" not in left
    assert not any(name.endswith(".index.json") for name in left)
    published = (out / complete[0]).stat().st_mtime_ns
    assert quantize(model, out, *OPTIONS, "--resume") == 0
    assert contents(out) == contents(whole)
    assert (out / complete[0]).stat().st_mtime_ns == published


def test_resumed_events_begin_where_it_stopped(llama, tmp_path, stops_after_one):
    recipe = Recipe(max_shard_size="20KB")
    checkpoint = open_checkpoint(llama)
    plan = plan_quantize(checkpoint, recipe, model="m", arch_spec=None, strict=False)
    with pytest.raises(Stop):
        list(pipeline.run(plan, tmp_path / "out"))
    stops_after_one.undo()
    events = list(pipeline.run(plan, tmp_path / "out", resume=True))
    assert len(events) < len(plan.jobs)
    assert events[-1].done == events[-1].total == plan.source_bytes


def test_a_group_across_a_published_file_is_resumed(llama, tmp_path, stops_after_one):
    """Its members are computed together again, and those already on disk are left alone."""
    recipe = Recipe(max_shard_size="37KB")
    checkpoint = open_checkpoint(llama)
    plan = plan_quantize(checkpoint, recipe, model="m", arch_spec=None, strict=False)
    first = {output.name for output in plan.shards[0].outputs}
    group = next(job for job in plan.jobs if len(job.members) == 3)
    assert len({member.outputs[0].name in first for member in group.members}) == 2
    with pytest.raises(Stop):
        list(pipeline.run(plan, tmp_path / "out"))
    stops_after_one.undo()
    list(pipeline.run(plan, tmp_path / "out", resume=True))
    list(pipeline.run(plan, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_may_not_change(tiny_model, tmp_path, stops_after_one, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model("llama", vocab=264), model)
    with pytest.raises(Stop):
        quantize(model, out, *OPTIONS)
    stops_after_one.undo()
    before = contents(out)
    refusals = {
        "holds an unfinished run: add --resume": OPTIONS,
        "The recipe changed": (*OPTIONS, "--seed", "1", "--resume"),
    }
    for sentence, options in refusals.items():
        assert quantize(model, out, *options) == 1
        assert sentence in capsys.readouterr().err
    os.utime(model / "model.safetensors", (1, 1))
    assert quantize(model, out, *OPTIONS, "--resume") == 1
    assert "The source changed" in capsys.readouterr().err
    assert contents(out) == before


def test_in_place_is_refused(llama, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    before = contents(model)
    for out in (model, model / "out", tmp_path):
        assert quantize(model, out) == 1
        assert "source folder" in capsys.readouterr().err
    assert contents(model) == before


def test_a_folder_in_use_is_refused(llama, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert quantize(llama, tmp_path) == 1
    assert "is not empty" in capsys.readouterr().err
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_too_little_disk_is_said_before_work(llama, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert quantize(llama, tmp_path / "out") == 1
    assert "GB free and this run writes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_stops_and_resumes(llama, tmp_path, monkeypatch, capsys):
    out, write = tmp_path / "out", os.pwrite
    written = 0

    def full(fd: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 60_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert quantize(llama, out, *OPTIONS) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in message
    assert message.endswith("--resume.")
    assert (out / JOURNAL).exists()
    assert not (out / "config.json").exists()
    assert quantize(llama, out, *OPTIONS, "--resume") == 0
    assert quantize(llama, tmp_path / "whole", *OPTIONS) == 0
    assert contents(out) == contents(tmp_path / "whole")


# Memory

PEAKS = """
import re, sys
from pathlib import Path
from nvfp4cli import pipeline
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.recipe import Recipe

def status(key):
    lines = Path("/proc/self/status").read_text()
    return int(re.search(key + r":\\s+(\\d+) kB", lines)[1]) * 1024

def run(model, out, rotate):
    checkpoint = open_checkpoint(Path(model))
    recipe = Recipe(rotate=rotate, max_shard_size="40MB")
    plan = plan_quantize(checkpoint, recipe, model="m", arch_spec=None, strict=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at the present
    before = status("VmRSS")
    list(pipeline.run(plan, Path(out)))
    after = status("VmHWM")
    print(after - before, plan.memory_bytes, plan.source_bytes)

small, large, out, rotate = sys.argv[1:]
run(small, out + "/a", rotate)
run(large, out + "/b", rotate)
"""


@pytest.fixture
def large(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A Llama of 32 layers and 212 MB, of which no group has more than 3 MB."""
    small, folder = tiny_model("llama", vocab=264), tmp_path / "large"
    folder.mkdir()
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 32,
             "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8,
             "vocab_size": 4096}  # fmt: skip
    config = json.loads((small / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    grown = {32: 512, 64: 512, 128: 1408, 264: 4096}  # axes of the small model
    tensors = {}
    for name, tensor in load_file(small / "model.safetensors").items():
        for layer in range(32):
            renamed = name.replace(".layers.0.", f".layers.{layer}.")
            shape = [grown[n] for n in tensor.shape]
            if renamed not in tensors:
                tensors[renamed] = torch.randn(shape).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("rotate", ["none", "r1r2"])
def test_memory_does_not_grow_with_the_model(rotate, llama, large, tmp_path):
    argv = [sys.executable, "-c", PEAKS, str(llama), str(large), str(tmp_path), rotate]
    result = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    grown, promised, source = map(int, result.stdout.splitlines()[-1].split())
    assert source > 200e6
    assert grown < source / 2
    assert grown < promised
