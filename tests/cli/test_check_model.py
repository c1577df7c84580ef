"""The command check-model: verdicts, exit codes and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvfp4cli.check import compare
from nvfp4cli.errors import UnsupportedError

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "num_attention_heads": 32}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path / "config.json", LLAMA)


def written(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


def spec(folder: Path, **entries: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"model_type": "llama", "extends": "llama", **entries}))
    return path


def test_a_fold_that_holds(run, config: Path) -> None:
    code, stdout, stderr = run("check-model", config)
    assert (code, stderr) == (0, "")
    first, r1, r2 = stdout.splitlines()
    assert first.startswith(f"{config}: llama, a random twin of 2 layers and ")
    assert r1.startswith("  R1 holds: max |d logit| / max |logit| = ")
    assert r2.startswith("  R2 holds: ")


def test_json(run, config: Path) -> None:
    code, stdout, _ = run("check-model", config.parent, "--json")
    found = json.loads(stdout)
    assert code == 0
    assert (found["model_type"], found["layers"], found["pictures"]) == ("llama", 2, None)
    assert found["warnings"] == []
    assert set(found["rotations"]) == {"r1", "r2"}
    for verdict in found["rotations"].values():
        assert verdict["verdict"] == "holds"
        assert 0 < verdict["error"] < found["limit"]
        assert verdict["reason"] is None


def test_a_spec_that_says_something_false(run, config: Path, tmp_path: Path) -> None:
    false = spec(tmp_path, norm_gain="one_plus")
    code, stdout, stderr = run("check-model", config, "--arch-spec", false)
    assert (code, stderr) == (1, "")
    assert "  R1 is WRONG: max |d logit| / max |logit| = " in stdout
    assert "do not use --rotate r1 until it is corrected" in stdout
    assert "  R2 holds: " in stdout
    code, stdout, _ = run("check-model", config, "--arch-spec", false, "--json")
    assert code == 1
    assert json.loads(stdout)["rotations"]["r1"]["verdict"] == "wrong"


def test_a_rotation_that_the_spec_refuses(run, tmp_path: Path) -> None:
    config = written(tmp_path / "config.json", {"model_type": "gemma2"})
    code, stdout, _ = run("check-model", config)
    assert code == 0
    assert "  R1 is refused: R1 does not hold for gemma2: " in stdout
    assert "  R2 holds: " in stdout


def test_the_spec_beside_a_checkpoint_is_the_one_that_is_proved(
    run, config: Path, tmp_path: Path
) -> None:
    spec(tmp_path, norm_gain="one_plus").rename(tmp_path / "nvfp4-arch-spec.yaml")
    assert run("check-model", tmp_path)[0] == 1


def refused(run, *argv: object) -> str:
    code, stdout, stderr = run("check-model", *argv)
    assert (code, stdout) == (1, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    return stderr


def test_what_is_no_model_is_refused(run, tmp_path: Path) -> None:
    assert "no such folder as /no/such/model" in refused(run, "/no/such/model")
    assert "has no config.json" in refused(run, tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refused(run, tmp_path)
    assert "name is empty" in refused(run, "")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "has none"),
        ({"model_type": ["a"]}, 'gives ["a"]'),
        ({"model_type": None}, "gives null"),
    ],
)
def test_a_config_that_names_no_model_type_is_refused(
    run, config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    stderr = refused(run, written(tmp_path / "config.json", config))
    assert f'must name the model_type, such as "llama", and this one {said}: correct it' in stderr


@pytest.mark.parametrize("model_type", ["phi3", "llava"])
def test_tokens_that_the_config_leaves_to_defaults(run, model_type: str, tmp_path: Path) -> None:
    """phi3's of padding and llava's of a picture lie far outside a twin's vocabulary."""
    code, stdout, _ = run("check-model", written(tmp_path / "c.json", {"model_type": model_type}))
    assert code == 0
    assert "  R1 holds: " in stdout


def test_a_file_has_no_revision(run, config: Path) -> None:
    code, _, stderr = run("check-model", config, "--revision", "main")
    assert code == 2
    assert "is a file and has no revision main: drop --revision" in stderr


def test_a_model_type_without_a_spec_is_refused(run, tmp_path: Path) -> None:
    config = written(tmp_path / "config.json", {"model_type": "gpt_neox"})
    assert "No architecture spec for model_type 'gpt_neox'" in refused(run, config)


def test_a_spec_that_does_not_fit_is_an_error(run, config: Path, tmp_path: Path) -> None:
    false = spec(tmp_path, biases={"mlp": True})
    assert "mlp.gate_proj.bias" in refused(run, config, "--arch-spec", false)


def test_pictures_that_cannot_be_shown_are_said(run, config: Path, monkeypatch) -> None:
    monkeypatch.setattr(compare, "sighted", lambda _: False)
    code, stdout, stderr = run("check-model", config, "--json")
    assert code == 0
    assert "warning: Only text was compared" in stderr
    assert json.loads(stdout)["pictures"] is False
    assert len(json.loads(stdout)["warnings"]) == 1


def test_code_of_a_model_that_fails_is_an_error(run, config: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes\ndo not fit")

    monkeypatch.setattr(compare, "inputs", fail)
    assert "cannot run a small llama model (shapes do not fit)" in refused(run, config)


def test_no_logits_are_no_proof(run, config: Path, monkeypatch) -> None:
    monkeypatch.setattr(compare, "distance", lambda *_: float("nan"))
    assert run("check-model", config)[0] == 1


def test_attempt_names_the_type() -> None:
    from nvfp4cli.check.twin import attempt

    with pytest.raises(UnsupportedError, match="a small x model"), attempt("x"):
        raise ValueError
