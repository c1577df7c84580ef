"""A checkpoint with low-rank branches computes with both parts of its weights."""

import torch
from command import quantize
from safetensors.torch import load_file, save_file

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.layouts import branch, open_weights
from nvfp4cli.runtime.model import load


def test_a_model_has_the_sums(tiny_model, tmp_path):
    out = tmp_path / "out"
    assert quantize(tiny_model("llama"), out, "--layout", "modelopt") == 0
    weights = open_weights(open_checkpoint(out))
    generator = torch.Generator().manual_seed(0)
    sums = {}
    tensors = load_file(out / "model.safetensors")
    for module, (n, k) in weights.quantized.items():
        halves = torch.randn(2, k, generator=generator), torch.randn(n, 2, generator=generator)
        low = LowRank(*(half.bfloat16() for half in halves))
        sums[module] = weights.tensor(f"{module}.weight") + low.product()
        tensors |= branch.export(module, low)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    model = load(out, dtype=torch.float32, device="cpu")
    for module, expected in sums.items():
        assert torch.equal(model.get_submodule(module).weight, expected)
