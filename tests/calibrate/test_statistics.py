"""The file that calibration leaves."""

import pytest
import torch
from safetensors.torch import save_file

from nvfp4cli.calibrate.statistics import Inputs, Statistics
from nvfp4cli.errors import CheckpointError


def test_it_comes_back_as_it_was(tmp_path):
    made = Statistics(
        {"text": "a", "sequences": 3},
        {"model.layers.0.mlp.down_proj": Inputs(1.25, torch.arange(16.0), 96)},
        {"model.layers.0.self_attn": 3.5},
        {"model.layers.0.self_attn": 0.0},
    )
    made.save(tmp_path / "s.safetensors")
    found = Statistics.load(tmp_path / "s.safetensors")
    assert (found.facts, found.keys, found.values) == (made.facts, made.keys, made.values)
    ((name, one),) = found.inputs.items()
    assert (name, one.amax, one.tokens) == ("model.layers.0.mlp.down_proj", 1.25, 96)
    assert torch.equal(one.mean_square, torch.arange(16.0))
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "other"
    with pytest.raises(CheckpointError, match="holds no statistics"):
        Statistics.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="holds no statistics"):
        Statistics.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="name a file that `nvfp4 calibrate` wrote"):
        Statistics.load(path)


def test_a_magnitude_that_is_none_is_refused(tmp_path):
    Statistics({}, {"m": Inputs(torch.inf, torch.zeros(16), 1)}).save(tmp_path / "s")
    with pytest.raises(CheckpointError, match="gives m a largest magnitude of inf"):
        Statistics.load(tmp_path / "s")
