"""Twins of every model type: made, written, loaded again, and nothing in them left to luck."""

from pathlib import Path

import architectures
import pytest
import torch
from architectures import Case
from safetensors.torch import load_file, save_file

from nvfp4cli.check.compare import check, logits
from nvfp4cli.check.inputs import inputs
from nvfp4cli.check.precision import float64
from nvfp4cli.check.shrink import VOCAB, configuration
from nvfp4cli.check.twin import load, twin
from nvfp4cli.errors import CheckpointError, UnsupportedError


@pytest.mark.parametrize("case", architectures.ALL, ids=lambda case: case.id)
def test_a_twin_is_what_it_should_be(case: Case, tmp_path: Path) -> None:
    made = twin(case.config)
    made.write(tmp_path)
    whole, small = (configuration(c).get_text_config() for c in (case.config, made.config))
    for key in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        assert set(getattr(small, key, None) or ()) == set(getattr(whole, key, None) or ())
    first, second = load(tmp_path), load(tmp_path)
    assert {value.dtype for value in first.state_dict().values()} <= {torch.float64, torch.int64}
    given = inputs(first)
    found = logits(first, given)
    assert found.isfinite().all()
    assert found.std() > 0.01
    assert torch.equal(found, logits(second, given))
    # Not bit for bit: the memory of a loaded tensor may be aligned otherwise.
    torch.testing.assert_close(found, logits(made.model, given), rtol=0, atol=1e-12)
    if "pixel_values" in given:
        other = logits(second, given | {"pixel_values": -given["pixel_values"]})
        assert (found - other).abs().max() > 0.1 * found.abs().max(), "the picture is not seen"
    for name, value in made.model.named_parameters():
        assert value.numel() == 1 or value.std() > 0.02, f"{name} was left at its initial value"
        if "embed" in name and value.shape[0] == VOCAB:
            assert value.mean(1).std() > 0.3, f"the rows of {name} are centred"


def test_the_seed_decides() -> None:
    config = architectures.TEXT[0].config
    first, again, other = (twin(config, seed).model for seed in (0, 0, 1))
    values = [model.lm_head.weight for model in (first, again, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_transformers_is_put_back() -> None:
    from transformers.models.llama import modeling_llama

    with float64():
        assert modeling_llama.torch.float32 is torch.float64
        assert modeling_llama.torch.nn is torch.nn
        assert torch.ones(1, dtype=torch.bfloat16).float().dtype == torch.float64
        assert torch.get_default_dtype() == torch.float64
    assert modeling_llama.torch is torch
    assert torch.ones(1, dtype=torch.bfloat16).float().dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_a_tensor_that_is_missing_is_not_filled_in(tmp_path: Path) -> None:
    twin(architectures.TEXT[0].config).write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing_keys \['model.norm.weight'\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [("nemotron", "num_key_value_heads"), ("deepseek_v2", "num_experts_per_tok")],
)
def test_a_size_that_is_missing_is_named(model_type: str, missing: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"give {missing}\b.* in its config.json"):
        check({"model_type": model_type})


def test_what_generates_no_text_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no language model of the type 'clip'"):
        twin({"model_type": "clip"})
