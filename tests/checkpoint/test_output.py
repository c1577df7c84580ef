"""Who may write where, and what a refusal or a failed run leaves behind: nothing."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvfp4cli.checkpoint.output import JOURNAL, OutputFolder
from nvfp4cli.errors import CheckpointError

FINGERPRINT = {"version": "1", "recipe": {"ignore": ["lm_head"], "seed": 0}, "source": "abc"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def claim(
    out: Path, source: Path, resume: bool = False, fingerprint: dict[str, Any] = FINGERPRINT
) -> OutputFolder:
    return OutputFolder(out, source, fingerprint, resume)


def interrupt(out: Path, source: Path) -> None:
    """Leave what a killed run leaves: a journal, complete and partial shards."""
    with claim(out, source):
        (out / "model-00001-of-00002.safetensors").write_bytes(b"whole")
        (out / "model-00002-of-00002.safetensors.partial").write_bytes(b"half")


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def refused(folder: OutputFolder, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence), folder:
        pytest.fail("the folder was claimed")


def test_a_run_that_ends_well_leaves_no_journal(out: Path, source: Path) -> None:
    with claim(out, source) as folder:
        assert (out / JOURNAL).is_file()
        (out / "config.json").write_text("{}")
        folder.finish()
    assert tree(out) == {"config.json": b"{}"}


def test_an_empty_folder_may_be_there(out: Path, source: Path) -> None:
    out.mkdir()
    with claim(out, source) as folder:
        folder.finish()
    assert tree(out) == {}


def test_parents_are_made(out: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(out / "a" / "b", source) as folder:
        folder.finish()
    assert tree(out) == {"a": None, "a/b": None}
    monkeypatch.chdir(out)
    with claim(Path("relative"), source) as folder:
        folder.discard(())
    assert tree(out) == {"a": None, "a/b": None}


# Refusals. Each must leave everything as it was.


@pytest.mark.parametrize("name", ["config.json", ".hidden", "folder/"])
def test_a_folder_that_is_not_empty(out: Path, source: Path, name: str) -> None:
    out.mkdir()
    path = out / name
    path.mkdir() if name.endswith("/") else path.write_bytes(b"mine")
    before = tree(out)
    for resume in (False, True):
        refused(claim(out, source, resume), f"{out} is not empty: choose another output folder")
    assert tree(out) == before


def test_an_unfinished_run_without_resume(out: Path, source: Path) -> None:
    interrupt(out, source)
    before = tree(out)
    refused(claim(out, source), f"{out} holds an unfinished run: add --resume to continue it")
    assert tree(out) == before


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"source": "abd"}, "The source changed since the run in"),
        ({"recipe": {"ignore": [], "seed": 0}}, "The recipe changed since"),
        ({"version": "2", "source": ""}, "The version and the source changed since"),
        ({"architecture spec": "new"}, "The architecture spec changed since"),
    ],
)
def test_resuming_with_something_changed(
    out: Path, source: Path, changes: dict[str, Any], sentence: str
) -> None:
    interrupt(out, source)
    before = tree(out)
    refused(claim(out, source, True, FINGERPRINT | changes), f"{sentence}.*: run it as before, or")
    assert tree(out) == before


@pytest.mark.parametrize(
    "journal", [b"", b"{", b"[]", b"3", b"{}", b"\xff", b'{"fingerprint": 1, "made": 1}']
)
def test_a_damaged_journal(out: Path, source: Path, journal: bytes) -> None:
    interrupt(out, source)
    (out / JOURNAL).write_bytes(journal)
    before = tree(out)
    refused(claim(out, source, True), f"{JOURNAL} is damaged: delete the folder and start again")
    assert tree(out) == before


def test_the_source_and_what_is_inside_or_around_it(tmp_path: Path, source: Path) -> None:
    (source / "part").mkdir()
    (source / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(source)
    before = tree(tmp_path)
    for out in (
        source,
        source / "part",
        source / "new" / "er",
        tmp_path,
        tmp_path / "link",
        tmp_path / "link" / "new",
        source / ".." / "source",
    ):
        refused(claim(out, source), "is the source folder, inside it or around it: choose an outp")
    refused(claim(source, tmp_path / "link"), "is the source folder")
    assert tree(tmp_path) == before
    with claim(tmp_path / "source2", source) as folder:
        folder.discard(())
    assert tree(tmp_path) == before


def test_a_file_in_the_place_of_the_folder(tmp_path: Path, source: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path)
    refused(claim(file, source), f"{file} cannot be written .*: choose another output folder")
    refused(claim(file / "out", source), "cannot be written")
    refused(claim(tmp_path / "gone", source), "cannot be written")
    assert tree(tmp_path) == before


def test_a_name_that_is_too_long(tmp_path: Path, source: Path) -> None:
    before = tree(tmp_path)
    refused(claim(tmp_path / "new" / ("x" * 300), source), "cannot be written")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("module", "function", "code"),
    [
        (os, "open", errno.EROFS),
        (fcntl, "flock", errno.ENOLCK),
        (Path, "write_text", errno.ENOSPC),
        (os, "fsync", errno.EIO),
    ],
    ids=["folder", "lock", "disk", "device"],
)
@pytest.mark.parametrize("exists", [False, True])
def test_a_place_that_cannot_be_written(
    out: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    function: str,
    code: int,
    exists: bool,
) -> None:
    if exists:
        out.mkdir()
    before = tree(out.parent)

    def fail(*args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(module, function, fail)
        target = out if exists else out / "deep"
        refused(claim(target, source), rf"cannot be written \({os.strerror(code)}\): choose")
    assert tree(out.parent) == before
    with claim(out, source) as folder:  # and nothing stays locked
        folder.finish()


def test_a_parent_that_cannot_be_written(
    out: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated in the second of two folders to be made, since root may write anywhere."""
    before = tree(out.parent)
    whole = Path.mkdir

    def fail(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "denied":
            raise PermissionError(errno.EACCES, "Permission denied")
        whole(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", fail)
    refused(claim(out / "denied", source), r"cannot be written \(Permission denied\): choose")
    assert tree(out.parent) == before


HOLD = """
import sys
from pathlib import Path
from nvfp4cli.checkpoint.output import OutputFolder
out, source, fingerprint = Path(sys.argv[1]), Path(sys.argv[2]), eval(sys.argv[3])
with OutputFolder(out, source, fingerprint, sys.argv[4] == "resume") as folder:
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["new", "resume"])
def test_a_second_process_is_locked_out(out: Path, source: Path, mode: str) -> None:
    if mode == "resume":
        interrupt(out, source)
    command = [sys.executable, "-c", HOLD, str(out), str(source), repr(FINGERPRINT), mode]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        before = tree(out)
        refused(claim(out, source, resume=True), f"Another run is writing to {out}: wait for it")
        refused(claim(out, source), "holds an unfinished run")
        assert tree(out) == before
        first.kill()
    with claim(out, source, resume=True) as folder:  # a dead process holds nothing
        folder.finish()


def test_a_journal_made_meanwhile(out: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs find the folder empty, and the other one is faster."""
    out.mkdir()
    found_empty = OutputFolder._check_content

    def slow(folder: OutputFolder) -> bool:
        empty = found_empty(folder)
        (out / JOURNAL).write_text("theirs")
        return empty

    monkeypatch.setattr(OutputFolder, "_check_content", slow)
    refused(claim(out, source), f"Another run is writing to {out}")
    assert tree(out) == {JOURNAL: b"theirs"}


# Resuming and discarding


def test_resuming_keeps_what_is_there(out: Path, source: Path) -> None:
    interrupt(out, source)
    before = tree(out)
    for _ in range(2):  # a resumed run can be interrupted too
        with claim(out, source, resume=True):
            assert tree(out) == before
    with claim(out, source, resume=True) as folder:
        folder.finish()
    assert tree(out) == {name: data for name, data in before.items() if name != JOURNAL}


def test_resume_begins_where_there_is_nothing(out: Path, source: Path) -> None:
    with claim(out, source, resume=True) as folder:
        assert json.loads((out / JOURNAL).read_text())["fingerprint"] == FINGERPRINT
        folder.finish()


FILES = ("model.safetensors", "part/of/tokenizer.json", "link", "never_written.json")


def fill(out: Path, elsewhere: Path) -> None:
    """The files of a run, one of them partial, and one that is a link."""
    (out / "part/of").mkdir(parents=True)
    (out / "part/of/tokenizer.json").write_bytes(b"{}")
    (out / "model.safetensors.partial").write_bytes(b"half")
    (out / "link").symlink_to(elsewhere / "kept")


@pytest.mark.parametrize("below", ["", "a/b"])
def test_discard_removes_what_the_run_made(
    tmp_path: Path, out: Path, source: Path, below: str
) -> None:
    (source / "kept").write_bytes(b"theirs")
    before = tree(tmp_path)
    with claim(out / below, source) as folder:
        fill(out / below, source)
        folder.discard(FILES)
    assert tree(tmp_path) == before


def test_discard_leaves_what_was_not_written_by_the_run(
    tmp_path: Path, out: Path, source: Path
) -> None:
    out.mkdir()
    with claim(out, source) as folder:
        fill(out, source)
        folder.discard(FILES)
    assert tree(tmp_path) == {"source": None, "out": None}

    with claim(out / "deeper" / "still", source) as folder:
        fill(out / "deeper" / "still", source)
        (out / "deeper" / "still" / "part" / "mine").write_bytes(b"")  # put there while it ran
        folder.discard(FILES)
    folders = ["deeper", "deeper/still", "deeper/still/part"]
    assert tree(out) == {**dict.fromkeys(folders), "deeper/still/part/mine": b""}


def test_discard_of_a_resumed_run_removes_what_the_first_made(
    tmp_path: Path, out: Path, source: Path
) -> None:
    interrupt(out / "deep", source)
    before = tree(out / "deep")
    with claim(out / "deep", source, resume=True) as folder:
        folder.discard(before)
    assert tree(tmp_path) == {"source": None}


def test_an_error_inside_passes_and_unlocks(out: Path, source: Path) -> None:
    with pytest.raises(KeyError), claim(out, source):
        raise KeyError
    assert tree(out).keys() == {JOURNAL}
    with claim(out, source, resume=True) as folder:
        folder.finish()
