"""One layer in memory at a time computes what the whole model does, to the last bit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.layouts.sources import open_source
from nvfp4cli.runtime.model import load
from nvfp4cli.runtime.parts import Parts

# Tied heads, Conv1D, tuples put out by layers, experts apart and together, windows, two levels of
# names, state spaces, buffers that the model around the layers fills.
TYPES = [
    "llama", "gpt2", "opt", "starcoder2", "gemma2", "gemma3", "cohere2", "mixtral", "granitemoe",
    "gpt_oss", "llama4_text", "deepseek_v3", "glm4_moe", "qwen3_next", "lfm2", "falcon_h1",
]  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12)


def parts(folder: Path, **without: None) -> Parts:
    source = open_source(open_checkpoint(folder))
    tensors = {name: partial(source.read, name) for name in source.tensors if name not in without}
    config = json.loads((folder / "config.json").read_text())
    return Parts(config, tensors, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_layer_by_layer_is_the_whole(tiny_model: Callable[..., Path], model_type: str) -> None:
    folder = tiny_model(model_type)
    model = parts(folder)
    batches = [TOKENS, TOKENS[:1] + 5]  # two shapes
    hidden = model.enter(batches)
    for number in range(len(model)):
        layer = model.layer(number)
        hidden = [layer(one) for one in hidden]
    tail = model.tail()
    whole = load(folder, dtype=torch.float32, device="cpu")
    for tokens, one in zip(batches, hidden, strict=True):
        assert torch.equal(tail(one), whole(input_ids=tokens, use_cache=False).logits)


def test_a_part_has_its_own_weights_alone(tiny_model: Callable[..., Path]) -> None:
    model = parts(tiny_model("llama"))
    names = {name for name, _ in model.layer(1).module.named_parameters()}
    assert "self_attn.q_proj.weight" in names
    whole = load(tiny_model("llama"), dtype=torch.float32, device="cpu")
    sizes = [sum(p.numel() for p in one.parameters()) for one in (model.layer(1).module, whole)]
    assert sizes[0] < sizes[1] / 2


def test_what_is_missing_is_named(tiny_model: Callable[..., Path]) -> None:
    missing = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{missing} is missing or of another shape"):
        parts(tiny_model("llama"), **{missing: None}).layer(1)


def test_an_unknown_model_type_is_refused() -> None:
    for model_type in ("nobody", ["llama"], None):
        with pytest.raises(UnsupportedError, match="does not know the model type"):
            Parts({"model_type": model_type}, {}, dtype=torch.float32, device="cpu")
