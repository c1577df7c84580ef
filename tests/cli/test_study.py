"""The command study: its tables, its JSON, what it refuses and when."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from nvfp4cli.cli import studying
from nvfp4cli.study.methods import METHODS

NAMES = [method.name for method in METHODS]


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of any kind fails the test: what is tested comes before."""

    def work(*_: object) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr(studying.synthetic, "tables", work)
    monkeypatch.setattr(studying.hub, "resolve", work)


def test_the_synthetic_tables(run):
    code, stdout, stderr = run("study")
    assert (code, stderr) == (0, "")
    assert "draws of 256 x 64, seed 0" in stdout
    assert "draws of 256 x 128, seed 0" in stdout
    row = next(line for line in stdout.splitlines() if "all values" in line)
    assert re.findall(r"0\.\d+", row)[:2] == ["0.0902", "0.1155"]


def test_json_of_the_draws(run):
    code, stdout, _ = run("study", "--json")
    assert code == 0
    found = json.loads(stdout)
    assert (found["seed"], found["metric"]) == (0, "relative L2 error")
    assert [method["name"] for method in found["methods"]] == NAMES
    narrow, wide = found["tables"]
    assert (narrow["shape"], wide["shape"]) == ([256, 64], [256, 128])
    assert f"{narrow['errors']['gaussian']['nvfp4-h16']:.4f}" == "0.0948"
    assert "nvfp4-h128" not in narrow["errors"]["gaussian"]
    assert "nvfp4-h128" in wide["errors"]["gaussian"]


def test_json_of_weights(run, llama):
    code, stdout, _ = run("study", llama, "--json")
    assert code == 0
    found = json.loads(stdout)
    assert (found["checkpoint"], found["available"], found["measured"]) == (str(llama), 14, 14)
    assert len(found["tensors"]) == 14
    assert found["values"] == sum(n * k for n, k in (t["shape"] for t in found["tensors"]))
    assert {kind["kind"]: kind["weights"] for kind in found["kinds"]}["q_proj"] == 2
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    query = by_name["model.layers.1.self_attn.q_proj.weight"]  # 64 wide
    assert query["errors"]["nvfp4-h128"] is None
    assert 0.08 < query["errors"]["nvfp4"] < 0.11
    assert query["best"] in NAMES
    assert found["all"]["weights"] == sum(found["all"]["best"].values()) == 14
    assert found["all"]["mean_errors"]["nvfp4-h128"] is None
    assert found["helped"]["nvfp4"]["nvfp4-h128"]["of"] == 2  # down_proj
    assert found["helped"]["mxfp4"]["mxfp4-h16"]["of"] == 14


def test_tables_of_weights(run, llama):
    code, stdout, stderr = run("study", llama, "--limit", "1")
    assert (code, stderr) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")] for line in stdout.splitlines()]
    cells = {row[1]: row[2:-1] for row in rows if len(row) > 2}
    tensor = cells["model.layers.1.self_attn.q_proj.weight"]
    assert (tensor[0], tensor[5]) == ("64x64", "no fit")
    assert cells["down_proj"][0] == "1"
    assert cells["down_proj"][5].startswith("0.")
    assert cells["all"][5] == "no fit"
    assert sum(map(int, cells["best in"][1:])) == 7
    assert "no fit: the length of some rows is no multiple" in stdout
    assert "Measured 7 of 14 weights" in stdout
    assert "H128 1 of 1" in stdout or "H128 0 of 1" in stdout


def test_many_weights_are_shown_by_kind(run, llama, monkeypatch):
    monkeypatch.setattr(studying, "_SHOWN_WEIGHTS", 13)
    _, stdout, _ = run("study", llama)
    assert "layers.0" not in stdout
    assert "Measured" not in stdout


def test_chosen_tensors(run, llama):
    _, stdout, _ = run("study", llama, "--tensors", "*.v_proj", "--tensors", "lm_head", "--json")
    kinds = [kind["kind"] for kind in json.loads(stdout)["kinds"]]
    assert sorted(kinds) == ["lm_head", "v_proj"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--tensors", "*"], "--tensors is of a checkpoint: name one, or leave the option out"),
        (["--limit", "1"], "--limit is of a checkpoint"),
        (["--revision", "main"], "--revision is of a checkpoint"),
        (["M", "--limit", "0"], "--limit.*: see `nvfp4 study --help`"),
        (["M", "--tensors", "re:("], "--tensors has .* no regular expression"),
        (["--plot", "figure.jpeg"], "--plot is figure.jpeg: give a name that ends in .png"),
        (["M", "--plot", "figure"], "--plot is figure: give a name that ends in .png"),
        (["--plot", ""], "--plot.*: the name is empty"),
    ],
)
def test_a_command_line_that_no_file_makes_right_is_2(argv, sentence, run, idle):
    code, stdout, stderr = run("study", *argv)
    assert (code, stdout) == (2, "")
    assert re.fullmatch(rf"error: .*{sentence}.*\.\n", stderr), stderr


@pytest.mark.parametrize("argv", [[], ["M"]])
def test_a_figure_without_matplotlib_is_refused_first(argv, run, idle, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, stdout, stderr = run("study", *argv, "--plot", tmp_path / "figure.png")
    assert (code, stdout) == (1, "")
    assert stderr == "error: --plot needs matplotlib: run pip install 'nvfp4cli[plots]'.\n"


@pytest.mark.parametrize("argv", [[], ["M"]])
def test_a_figure_that_has_no_place_is_refused_first(argv, run, idle, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "folder.png").mkdir()
    for name, fault in (("folder.png", "is a folder"), ("gone/figure.png", "gone is missing")):
        code, stdout, stderr = run("study", *argv, "--plot", tmp_path / name)
        assert (code, stdout) == (1, "")
        assert f"{fault}: name a file in a folder that exists" in stderr


@pytest.mark.parametrize("weights", [False, True])
def test_a_figure_is_drawn(weights, run, llama, tmp_path):
    pytest.importorskip("matplotlib")
    path: Path = tmp_path / "figure.png"
    argv = [llama, "--limit", "1"] if weights else []
    code, stdout, stderr = run("study", *argv, "--plot", path, "--json")
    assert code == 0
    assert json.loads(stdout)["metric"] == "relative L2 error"
    assert stderr == f"The figure is in {path}.\n"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_quantised_checkpoint_is_refused(run, llama, tmp_path):
    out = tmp_path / "out"
    assert run("quantize", llama, out)[0] == 0
    code, stdout, stderr = run("study", out)
    assert (code, stdout) == (1, "")
    assert f"{out} is quantised already: study the unquantised model" in stderr
