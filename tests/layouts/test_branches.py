"""Low-rank branches beside NVFP4 weights: written by one layout, read back as one weight."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import CheckpointError, UnsupportedError, WeightError
from nvfp4cli.formats import nvfp4
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.layouts import LAYOUTS, StoredWeights, branch, modelopt, open_weights
from nvfp4cli.layouts.record import Contents, Stored
from nvfp4cli.layouts.sources import open_source

N, K, RANK = 20, 48, 3


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored() -> Stored:
    weight = draw(N, K, seed=0)
    q = nvfp4.quantize(weight, nvfp4.GlobalScale.from_amax(nvfp4.amax(weight)))
    low = LowRank(draw(RANK, K, seed=1).bfloat16(), draw(N, RANK, seed=2).bfloat16())
    return Stored(q, branch=low)


def written(folder: Path, changes: dict[str, Tensor | None] | None = None) -> StoredWeights:
    tensors = {**modelopt.export("m", stored()), "norm.weight": torch.ones(K), **(changes or {})}
    folder.mkdir(exist_ok=True)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return open_weights(open_checkpoint(folder))


def expected() -> Tensor:
    one = stored()
    assert one.branch is not None
    up, down = one.branch.up.double(), one.branch.down.double()
    return nvfp4.dequantize(one.weight).double() + up @ down


def test_the_tensors_are_those_announced():
    found = {o.name: (o.dtype, o.shape) for o in branch.outputs("m", (N, K), RANK)}
    assert found == {
        "m.svdquant_lora_a": (torch.bfloat16, (RANK, K)),
        "m.svdquant_lora_b": (torch.bfloat16, (N, RANK)),
    }
    tensors = modelopt.export("m", stored())
    assert {name: (tensors[name].dtype, tensors[name].shape) for name in found} == found


def test_one_layout_holds_them():
    assert [name for name, layout in LAYOUTS.items() if layout.BRANCHES] == ["modelopt"]


def test_the_configuration():
    contents = Contents(quantized=["m"], kept=["lm_head"], activations=True, rank=RANK)
    config = modelopt.quantization_config(contents)
    assert config["quant_algo"] == "NVFP4_SVD"
    group = config["config_groups"]["group_0"]
    assert (group["lora_rank"], group["pre_quant_scale"]) == (RANK, False)
    (document,) = modelopt.extra_files(contents).values()
    assert document["quantization"]["quant_algo"] == "NVFP4_SVD"
    assert document["quantization"]["lora_rank"] == RANK
    # Without the groups NVFP4_SVD stands for activations in 4 bits.
    assert document["quantization"]["config_groups"] == config["config_groups"]


def test_it_is_read_as_one_weight(tmp_path):
    weights = written(tmp_path)
    assert weights.names == ("m.weight", "norm.weight")
    assert weights.ranks == {"m": RANK}
    found = weights.tensor("m.weight")
    assert found.dtype == torch.float32
    # Two products of a rank of 3 and a sum, in fp32.
    assert torch.allclose(found.double(), expected(), rtol=0, atol=8 * 2.0**-23 * 20)
    back = weights.stored("m").branch
    assert back is not None
    assert torch.equal(back.up, stored().branch.up) and torch.equal(back.down, stored().branch.down)


def test_it_is_a_source(tmp_path):
    written(tmp_path)
    source = open_source(open_checkpoint(tmp_path))
    assert list(source.tensors) == ["m.weight", "norm.weight"]
    whole = source.read("m.weight")
    assert torch.allclose(whole.double(), expected(), rtol=0, atol=8 * 2.0**-23 * 20)
    assert torch.equal(source.read_rows("m.weight", 5, 9), whole[5:9])
    size = source.tensors["m.weight"].nbytes
    assert size == N * K // 2 + N * K // 16 + 4 + 2 * RANK * (N + K)


def test_weights_without_a_branch_have_none(tmp_path):
    weights = written(tmp_path, {"m.svdquant_lora_a": None, "m.svdquant_lora_b": None})
    assert weights.ranks == {}
    assert weights.stored("m").branch is None
    assert torch.equal(weights.tensor("m.weight"), nvfp4.dequantize(stored().weight))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"m.svdquant_lora_a": None}, "lacks m.svdquant_lora_a"),
        ({"m.svdquant_lora_b": None}, "lacks m.svdquant_lora_b"),
        ({"m.svdquant_lora_a": draw(RANK, K, seed=1)}, "m.svdquant_lora_a is float32"),
        ({"m.svdquant_lora_b": draw(N, 2, seed=1).bfloat16()}, "m.svdquant_lora_b is bfloat16"),
        ({"m.svdquant_lora_a": draw(K, seed=1).bfloat16()}, "m.svdquant_lora_a is bfloat16"),
        ({"m.svdquant_lora_a": torch.ones(()).bfloat16()}, "m.svdquant_lora_a is bfloat16"),
    ],
)
def test_a_damaged_branch_is_refused(changes, sentence, tmp_path):
    weights = written(tmp_path, changes)
    with pytest.raises(CheckpointError, match=sentence):
        weights.stored("m")
    with pytest.raises(CheckpointError, match=sentence):
        open_source(open_checkpoint(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_branch_that_is_not_finite_is_refused(value, tmp_path):
    down = draw(RANK, K, seed=1).bfloat16()
    down[1, 5] = value
    weights = written(tmp_path, {"m.svdquant_lora_a": down})
    with pytest.raises(WeightError, match="branch of m holds NaN or Inf"):
        weights.tensor("m.weight")


def test_scales_of_inputs_that_are_not_folded_are_refused(tmp_path):
    """ModelOpt's own files have them, and the weight is another one without."""
    written(tmp_path, {"m.pre_quant_scale": torch.ones(K).bfloat16()})
    with pytest.raises(UnsupportedError, match=r"m\.pre_quant_scale in .* quantised with AWQ"):
        open_source(open_checkpoint(tmp_path))
