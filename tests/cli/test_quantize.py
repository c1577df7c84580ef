"""The command line of quantize: stdout is data, stderr is talk, errors are sentences."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from nvfp4cli import __version__
from nvfp4cli.cli import quantizing
from nvfp4cli.formats.e2m1 import swap_nibbles
from nvfp4cli.recipe import Recipe, known


def recipe_of(folder: Path) -> dict[str, object]:
    return yaml.safe_load((folder / "nvfp4.yaml").read_text())["recipe"]


FACTS = {"layout", "presets", "scheme", "rotation", "source_bytes", "totals", "warnings"}


def test_json_of_a_run(run, llama, tmp_path):
    code, stdout, stderr = run("quantize", llama, tmp_path / "out", "--json", "--rotate", "r1r2")
    assert code == 0
    document = json.loads(stdout)
    assert document.keys() == FACTS | {"out", "seconds", "next_step"}
    assert document["out"] == str(tmp_path / "out")
    assert document["layout"] == "torchao"
    assert document["scheme"] == "w4a16"
    assert document["rotation"] == {
        "kind": "hadamard", "seed": 0, "sizes": {"r1": 64, "r2": 16},
    }  # fmt: skip
    assert str(tmp_path / "out") in document["next_step"]
    assert len(document["warnings"]) == 2
    lines = stderr.splitlines()
    assert lines == [f"warning: {message}" for message in document["warnings"]]


def test_json_of_a_plan(run, llama, tmp_path):
    argv = ("quantize", llama, tmp_path / "out", "--layout", "modelopt")
    code, stdout, _ = run(*argv, "--dry-run", "--json")
    assert code == 0
    document = json.loads(stdout)
    assert document.keys() == FACTS | {
        "disk_bytes", "memory_bytes", "calibration_memory_bytes", "shards", "tensors",
    }  # fmt: skip
    keys = {"name", "shape", "dtype", "action", "reason", "edits", "bytes"}
    assert all(row.keys() == keys for row in document["tensors"])
    assert document["shards"] == ["model.safetensors"]
    assert sum(row["bytes"] for row in document["tensors"]) == document["totals"]["bytes"]
    assert not (tmp_path / "out").exists()
    assert run(*argv, "--json")[0] == 0
    assert document["disk_bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_dry_run_for_people(run, llama, tmp_path):
    code, stdout, stderr = run("quantize", llama, tmp_path / "out", "--dry-run", "--rotate", "r1")
    assert code == 0
    assert "model.layers.1.mlp.down_proj.weight" in stdout
    assert "ScaleColumns+RotateRight" in stdout
    assert "nothing was written" in stdout
    assert stderr.startswith("warning: ")


def test_result_for_people(run, llama, tmp_path):
    _, stdout, _ = run("quantize", llama, tmp_path / "out", "--layout", "modelopt")
    summary, step = stdout.splitlines()
    assert re.search(r"-> \d+\.\d kB in .* s, \d+\.\d\d bits per parameter, \d+\.\d% of", summary)
    assert step == f"Serve: vllm serve {tmp_path / 'out'}"


def test_no_progress_where_stderr_is_no_terminal(run, llama, tmp_path):
    _, stdout, stderr = run("quantize", llama, tmp_path / "out", "--layout", "comfy")
    assert "\r" not in stderr + stdout
    assert "\x1b" not in stderr + stdout
    assert all(line.startswith("warning: ") for line in stderr.splitlines())


def test_version(run):
    assert run("--version") == (0, f"nvfp4 {__version__}\n", "")


def test_a_missing_model_is_an_error(run, tmp_path):
    code, _, stderr = run("quantize", tmp_path / "nope", tmp_path / "out")
    assert code == 1
    assert str(tmp_path / "nope") in stderr


def test_a_long_error_is_not_wrapped(run, tmp_path, llama):
    """Wrapped lines could not be copied, nor matched by a script."""
    code, _, stderr = run("quantize", llama, tmp_path / "out", "--recipe", "a b " * 60)
    assert code == 1
    assert stderr.count("\n") == 1


def test_names_in_brackets_are_shown(run, llama, tmp_path):
    """A message is text, not markup."""
    _, _, stderr = run("quantize", llama, tmp_path / "out", "--layout", "[red]x[/red]")
    assert "'[red]x[/red]'" in stderr


@pytest.mark.parametrize("name", known())
def test_shipped_recipes_by_name(name, run, llama, tmp_path):
    assert run("quantize", llama, tmp_path / "out", "--recipe", name)[0] == 0
    written = recipe_of(tmp_path / "out")
    assert set(written) == set(Recipe().to_dict())
    assert written["scheme"] == "w4a16"


def test_recipe_file_with_an_option_over_it(run, llama, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("layout: modelopt\nseed: 3\nrotate: r2\nignore: ['*.0.mlp.*']\n")
    argv = ("quantize", llama, tmp_path / "out", "--recipe", path, "--rotate", "r1")
    assert run(*argv)[0] == 0
    written = recipe_of(tmp_path / "out")
    assert (written["layout"], written["seed"], written["rotate"]) == ("modelopt", 3, "r1")
    assert written["ignore"] == ["*.0.mlp.*"]


def test_the_record_of_a_run_repeats_it(run, llama, tmp_path):
    options = ("--layout", "modelopt", "--rotate", "r1r2", "--seed", "5")
    assert run("quantize", llama, tmp_path / "a", *options)[0] == 0
    assert run("quantize", llama, tmp_path / "b", "--recipe", tmp_path / "a" / "nvfp4.yaml")[0] == 0
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / x).iterdir()} for x in "ab")
    assert a == b


def test_a_bug_keeps_its_traceback(run, llama, tmp_path, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(quantizing, "plan_quantize", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run("quantize", llama, tmp_path / "out")


def test_a_second_run_is_refused(run, llama, tmp_path):
    assert run("quantize", llama, tmp_path / "out")[0] == 0
    code, _, stderr = run("quantize", llama, tmp_path / "out")
    assert code == 1
    assert "is not empty" in stderr


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom nvfp4cli.cli.app import main\n"
        "assert main(['quantize', '--help']) == 0\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'triton')))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert result.returncode == 0
    assert b"--rotation-kind" in result.stdout


def test_a_spec_of_the_user_goes_with_the_output(run, llama, tmp_path):
    """So that inspect can rotate the source, and convert knows what is fused."""
    model, spec = tmp_path / "model", tmp_path / "spec.yaml"
    shutil.copytree(llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mine"}))
    spec.write_text("model_type: mine\nextends: llama\n")
    out, converted = tmp_path / "out", tmp_path / "converted"
    assert run("quantize", model, out, "--arch-spec", spec, "--rotate", "r1r2")[0] == 0
    assert (out / "nvfp4-arch-spec.yaml").read_text() == spec.read_text()
    assert run("convert", out, converted, "--layout", "modelopt")[0] == 0
    code, stdout, _ = run("inspect", converted, "--against", model, "--strict", "--json")
    assert (code, json.loads(stdout)["violations"]) == (0, [])


def test_patterns_that_scheme_none_ignores_are_said(run, llama, tmp_path):
    argv = ("quantize", llama, tmp_path / "out", "--scheme", "none", "--ignore", "*", "--dry-run")
    assert "do nothing with --scheme none" in run(*argv)[2]
    assert run(*argv, "--strict")[0] == 1


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        (["--scheme", "none", "--layout", "comfy"], ["--layout does nothing with --scheme none"]),
        (["--rotate", "none", "--seed", "0"], ["--seed does nothing without a rotation"]),
        (["--rotation-kind", "qr", "--seed", "0"], ["--rotation-kind does nothing", "--seed does"]),
        (["--layout", "comfy", "--max-shard-size", "1GB"], ["--max-shard-size does nothing"]),
        (["--resume"], ["--resume does nothing with --dry-run"]),
        (["--rotate", "r1", "--rotation-kind", "qr", "--seed", "0"], []),
        (["--scheme", "none", "--max-shard-size", "1GB"], []),
        (["--recipe", "comfy"], []),
    ],
)
def test_options_that_do_nothing_are_said(options, sentences, run, llama, tmp_path):
    argv = ("quantize", llama, tmp_path / "out", *options, "--dry-run")
    code, stdout, stderr = run(*argv, "--json")
    said = [message for message in json.loads(stdout)["warnings"] if "does nothing" in message]
    assert code == 0
    assert len(said) == len(sentences)
    assert all(message.startswith(s) for message, s in zip(said, sentences, strict=True))
    assert all(f"warning: {message}" in stderr.splitlines() for message in said)
    code, _, stderr = run(*argv, "--strict")
    assert (code, "does nothing" in stderr) == (1, True) if sentences else (0, False)


def test_values_of_a_recipe_file_are_no_choice_to_warn_about(run, llama, tmp_path):
    """The record of every run states them all."""
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump(Recipe(scheme="none", seed=3, layout="comfy").to_dict()))
    argv = ("quantize", llama, tmp_path / "out", "--recipe", path, "--strict", "--dry-run")
    assert run(*argv)[0] == 0
    code, _, stderr = run(*argv, "--seed", "4")
    assert code == 1
    assert "--seed does nothing" in stderr


def with_config(source: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("rotate", ["none", "r1"])
def test_a_head_that_differs_is_not_dropped_as_tied(run, llama, tmp_path, rotate):
    model = with_config(llama, tmp_path / "model", tie_word_embeddings=True)
    code, _, stderr = run("quantize", model, tmp_path / "out", "--rotate", rotate)
    assert code == 1
    assert "lm_head.weight is another matrix" in stderr
    assert not (tmp_path / "out").exists()


def test_sizes_that_contradict_the_weights_are_refused_without_rotation_too(run, llama, tmp_path):
    model = with_config(llama, tmp_path / "model", hidden_size=32)
    code, _, stderr = run("quantize", model, tmp_path / "out")
    assert code == 1
    assert "hidden_size is 32" in stderr


def test_resuming_a_finished_run_is_said(run, llama, tmp_path):
    assert run("quantize", llama, tmp_path / "out")[0] == 0
    code, _, stderr = run("quantize", llama, tmp_path / "out", "--resume")
    assert code == 1
    assert "holds a finished checkpoint" in stderr


def test_eval_of_a_model_that_gives_nan_fails(run, llama, tmp_path):
    model, text = tmp_path / "model", tmp_path / "text"
    shutil.copytree(llama, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text.write_text("the quick brown fox jumps over the lazy dog " * 4)
    for argv in (("eval", model), ("eval", llama, "--baseline", model)):
        code, stdout, stderr = run(*argv, "--ppl", "--text", text, "--json")
        assert (code, stdout) == (1, "")
        assert f"{model} computes values that are not finite" in stderr


def test_inspect_sees_codes_out_of_order(run, llama, tmp_path):
    out = tmp_path / "out"
    assert run("quantize", llama, out, "--layout", "modelopt")[0] == 0
    assert run("inspect", out, "--against", llama, "--strict")[0] == 0
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = swap_nibbles(tensors[name])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    code, stdout, _ = run("inspect", out, "--against", llama, "--strict", "--json")
    assert code == 1
    assert [v["tensor"] for v in json.loads(stdout)["violations"]] == [name]
