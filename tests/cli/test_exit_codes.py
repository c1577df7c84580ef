"""The boundary: exit codes, sentences, Ctrl-C and streams that cannot be written."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvfp4cli import pipeline
from nvfp4cli.cli import interrupts
from nvfp4cli.cli.app import main


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["frobnicate"], "No such command 'frobnicate': see `nvfp4 --help`"),
        (["quantize"], "Missing argument '.*': see `nvfp4 quantize --help`"),
        (["quantize", "M", "O", "more"], "more.*: see `nvfp4 quantize --help`"),
        (["quantize", "M", "O", "--frob"], "No such option.*--frob.*: see `nvfp4 quantize --help`"),
        (["quantize", "M", "O", "--layout"], "--layout.* requires an argument.*: see `nvfp4"),
        (["quantize", "M", "O", "--seed", "x"], "--seed.*: see `nvfp4 quantize --help`"),
        (["quantize", "M", "O", "--seed", "-1"], "--seed is -1: give a whole number"),
        (["quantize", "M", "O", "--scheme", "w3a16"], "--scheme is 'w3a16': choose one of"),
        (["quantize", "M", "O", "--layout", "gguf"], "--layout is 'gguf': choose one of"),
        (["quantize", "M", "O", "--rotate", "r4"], "--rotate is 'r4': choose one of"),
        (["quantize", "M", "O", "--rotation-kind", "x"], "--rotation-kind is 'x': choose one of"),
        (["quantize", "M", "O", "--dtype", "int8"], "--dtype is 'int8': choose one of"),
        (["quantize", "M", "O", "--ignore", "re:("], "--ignore has .* no regular expression"),
        (
            ["quantize", "M", "O", "--max-shard-size", "5 gallons"],
            "--max-shard-size is '5 gallons'",
        ),
        (["quantize", "M", "O", "--max-shard-size", "0GB"], "--max-shard-size is '0GB'"),
        (["quantize", "M", "O", "--device", "tpu"], "--device is 'tpu': choose auto"),
        (["quantize", "M", ""], "the name is empty: see `nvfp4 quantize --help`"),
        (["quantize", "M", "O", "--arch-spec", ""], "--arch-spec.*: the name is empty: see"),
        (["convert", "", "O", "--layout", "comfy"], "the name is empty: see"),
        (["eval", "M", "--ppl", "--text", ""], "--text.*: the name is empty: see"),
        (["convert", "M", "O"], "Missing option '--layout'.*: see `nvfp4 convert --help`"),
        (["convert", "M", "O", "--layout", "gguf"], "--layout is 'gguf': choose one of"),
        (
            ["convert", "M", "O", "--layout", "comfy", "--max-shard-size", "5"],
            "--max-shard-size is",
        ),
        (["inspect"], "Missing argument '.*': see `nvfp4 inspect --help`"),
        (["eval", "M"], "say what to measure, with --ppl"),
        (["eval", "M", "--ppl", "--context", "1"], "--context.*: see `nvfp4 eval --help`"),
        (["eval", "M", "--ppl", "--dtype", "int8"], "--dtype is 'int8': choose one of"),
        (["eval", "M", "--ppl", "--device", "tpu"], "--device is 'tpu': choose auto"),
        (["eval", "M", "--ppl", "--context", "64", "--stride", "65"], "--stride 65 in a --context"),
        (["eval", "M", "--ppl", "--stride", "1025"], "--stride 1025 in a --context of 1024 tokens"),
    ],
)
def test_a_command_line_that_no_file_makes_right_is_2(argv, sentence, run):
    code, stdout, stderr = run(*argv)
    assert (code, stdout) == (2, "")
    assert re.fullmatch(rf"error: .*{sentence}.*\.\n", stderr), stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--recipe", "nope"], "nope"),
        (["--recipe", "x" * 300], "File name too long"),
        (["--recipe", "."], ". is a folder"),
        (["--arch-spec", "nope.yaml"], "nope.yaml"),
        (["--ignore", "*.nope", "--strict"], "*.nope"),
        (["--include", "lm_head"], "lm_head"),
        (["--seed", "1", "--strict"], "--seed does nothing without a rotation"),
    ],
)
def test_everything_else_a_user_can_cause_is_1(options, named, run, llama, tmp_path):
    code, stdout, stderr = run("quantize", llama, tmp_path / "out", *options)
    assert (code, stdout) == (1, "")
    assert re.fullmatch(r"error: .*\.\n", stderr), stderr
    assert named in stderr
    assert not (tmp_path / "out").exists()


def test_a_broken_recipe_is_one_line(run, llama, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("layout: [a\nseed: }")
    code, _, stderr = run("quantize", llama, tmp_path / "out", "--recipe", path)
    assert code == 1
    assert stderr.count("\n") == 1
    assert str(path) in stderr


def test_a_value_in_a_recipe_file_is_not_wrong_usage(run, llama, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("layout: gguf")
    code, _, stderr = run("quantize", llama, tmp_path / "out", "--recipe", path)
    assert code == 1
    assert f"In {path}, layout is 'gguf': choose one of" in stderr


def test_without_a_command_the_help_is_the_answer(run):
    code, stdout, stderr = run()
    assert (code, stderr) == (0, "")
    assert stdout == run("--help")[1]
    assert "Usage: nvfp4" in stdout


def test_ctrl_c_says_how_to_continue(run, llama, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_compute", interrupted)
        code, stdout, stderr = run("quantize", llama, tmp_path / "out", "--json")
    assert code == 130
    assert stdout == ""
    assert "error: Interrupted" in stderr
    assert "--resume" in stderr.splitlines()[-1]
    assert run("quantize", llama, tmp_path / "out", "--resume")[0] == 0


# Sends the process the signal as soon as a module of that name is imported.
_INTERRUPT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from nvfp4cli.cli.app import entry
entry()
"""


def python(code: str, *argv: object, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("module", ["typer", "torch", "torch._C"])
def test_ctrl_c_during_imports_is_one_sentence(module, tmp_path):
    # The tests themselves may run in the background, which ignores it.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    result = python(heard + _INTERRUPT.format(module=module), "eval", tmp_path, "--ppl")
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == f"error: {interrupts.MESSAGE}\n"


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it(tmp_path):
    """As shells start what runs in the background."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    result = python(code + _INTERRUPT.format(module="typer"), "--version")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.fixture
def full():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as device:
        yield device


NO_SPACE = "error: stdout cannot be written (No space left on device): send it elsewhere.\n"


@pytest.mark.parametrize("argv", [["--help"], ["inspect"]])
def test_a_result_that_cannot_be_written_fails(argv, start, llama, full):
    with start(*argv, *([llama] if "inspect" in argv else []), stdout=full) as process:
        assert process.stderr.read() == NO_SPACE
    assert process.returncode == 1


def test_an_unbuffered_result_too(start, full):
    with start("--version", stdout=full, env={"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stderr.read() == NO_SPACE
    assert process.returncode == 1


@pytest.mark.parametrize("argv", [["--help"], ["inspect", "--json"]])
def test_a_reader_that_has_gone_is_left_in_peace(argv, start, llama):
    read, write = os.pipe()
    os.close(read)
    with start(*argv, *([llama] if "inspect" in argv else []), stdout=write) as process:
        os.close(write)
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


def test_talk_that_cannot_be_written_fails_nothing(start, llama, tmp_path):
    read, write = os.pipe()
    os.close(read)
    out = tmp_path / "out"
    with start("quantize", llama, out, "--device", "cpu", "--json", stderr=write) as process:
        os.close(write)
        assert len(json.loads(process.stdout.read())["warnings"]) == 2  # said on stderr too
    assert process.returncode == 0
    assert (out / "config.json").is_file()


@pytest.mark.parametrize(
    ("closed", "code", "stderr"),
    [((1,), 1, "error: stdout is closed: send it to a file, or to /dev/null.\n"), ((2,), 0, "")],
)
def test_closed_streams(closed, code, stderr):
    script = f"import os\nfor fd in {closed}: os.close(fd)\n"
    execute = (
        "import sys; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1], '--version'])"
    )
    result = python(script + execute, "from nvfp4cli.cli.app import entry; entry()")
    assert (result.returncode, result.stderr) == (code, stderr)


def test_a_name_that_the_encoding_lacks_is_escaped(start, llama, tmp_path):
    model = tmp_path / "größe"
    model.symlink_to(llama)
    with start("inspect", model, env={"PYTHONIOENCODING": "ascii"}) as process:
        assert "gr\\xf6\\xdfe" in process.stdout.read()
    assert process.returncode == 0


@pytest.mark.parametrize(
    "argv", [["quantize", "{model}", "{long}"], ["convert", "{long}", "{out}", "--layout", "comfy"]]
)
def test_a_name_too_long_is_a_sentence(argv, tiny_model, tmp_path, capsys):
    places = {"model": tiny_model("llama"), "long": tmp_path / ("x" * 300), "out": tmp_path / "out"}
    assert main([word.format(**places) for word in argv]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("is too long: choose another.")
