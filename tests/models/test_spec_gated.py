"""What a spec says of gated inputs, and what becomes of it in a spec that extends it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models import spec as specs

MLP = "model.layers.{layer}.mlp."
GATE, UP, DOWN = (f"{MLP}{name}_proj" for name in ("gate", "up", "down"))


def extended(folder: Path, modules: dict[str, Any]) -> specs.ArchSpec:
    path = folder / "nova.yaml"
    path.write_text(yaml.safe_dump({"model_type": "nova", "extends": "llama", "modules": modules}))
    return specs.load("nova", path)


def gated(spec: specs.ArchSpec) -> dict[str, tuple[str, ...]]:
    return {module.pattern: module.gated for module in spec.modules if module.gated}


def test_it_is_inherited(tmp_path):
    assert gated(specs.load("llama")) == gated(extended(tmp_path, {})) == {DOWN: (GATE, UP)}


def test_it_goes_with_the_gate(tmp_path):
    assert not gated(extended(tmp_path, {GATE: None}))
    assert DOWN in {module.pattern for module in extended(tmp_path, {GATE: None}).modules}


def test_it_goes_under_the_names_of_a_wrapper():
    names = ["language_model.model.layers.0.mlp.up_proj.weight"]
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    found = gated(specs.load_for(config, names))
    assert found == {f"language_model.{DOWN}": (f"language_model.{GATE}", f"language_model.{UP}")}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (UP, "write a list of names"),
        ([UP], "name there the gate and what it is multiplied with"),
        ([GATE, UP, UP], "name there the gate and what it is multiplied with"),
        ([f"{MLP}gone", UP], "'model.layers.{layer}.mlp.gone', which is no module there"),
    ],
)
def test_a_wrong_gate_is_refused(value, sentence, tmp_path):
    with pytest.raises(UnsupportedError, match=sentence):
        extended(tmp_path, {DOWN: {"role": "writer", "gated": value}})


def test_a_gate_of_its_own_that_is_gone_is_refused(tmp_path):
    own = {DOWN: {"role": "writer", "gated": [GATE, UP]}, GATE: None}
    with pytest.raises(
        UnsupportedError, match=r"gated of .*down_proj holds '.*gate_proj', which is"
    ):
        extended(tmp_path, own)
