"""Checkpoints with low-rank branches (--method svd), from the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import contents, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli import pipeline
from nvfp4cli.calibrate.statistics import Statistics
from nvfp4cli.calibrate.text import Sequences
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.layouts import StoredWeights, open_weights
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe
from nvfp4cli.runtime.model import load
from nvfp4cli.runtime.served import as_served, serve

WORDS = "The harbour lay still under a thin grey mist when the first boats came home. "
SVD = ("--layout", "modelopt", "--method", "svd", "--rank", "8")
SHORT = ("--sequences", "8", "--sequence-length", "32")
DOWN, UP = ".svdquant_lora_a", ".svdquant_lora_b"


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 12, encoding="utf-8")
    return str(path)


def written(folder: Path, out: Path, *options: str) -> StoredWeights:
    assert quantize(folder, out, *options) == 0
    return open_weights(open_checkpoint(out))


def kl(out: Path, source: Path, text: str, capsys: pytest.CaptureFixture[str]) -> float:
    argv = ["eval", str(out), "--ppl", "--baseline", str(source), "--text", text, "--context", "32"]
    capsys.readouterr()
    assert main([*argv, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["kl_divergence"]


@pytest.mark.parametrize(("model_type", "scheme"), [("gpt2", "w4a16"), ("mixtral", "w4a4")])
def test_branches_bring_the_model_nearer(tiny_model, tmp_path, text, capsys, model_type, scheme):
    """Also of weights that lie the other way round in the source, and of experts."""
    source = tiny_model(model_type)
    same = ("--scheme", scheme, "--text", text, *SHORT)
    written(source, tmp_path / "svd", *SVD, *same)
    written(source, tmp_path / "gptq", "--layout", "modelopt", "--method", "gptq", *same)
    found = {name: kl(tmp_path / name, source, text, capsys) for name in ("svd", "gptq")}
    assert found["svd"] < 0.9 * found["gptq"]
    assert main(["inspect", str(tmp_path / "svd"), "--strict", "--against", str(source)]) == 0


def test_branches_read_activations_that_are_not_rounded(llama, tmp_path, text):
    """A model whose branches are all there is computes as it does without 4-bit activations."""
    out = tmp_path / "out"
    written(llama, out, *SVD, "--scheme", "w4a4", "--text", text, *SHORT)
    tensors = load_file(out / "model.safetensors")
    for name in tensors:
        if tensors[name].dtype == torch.uint8:
            tensors[name].zero_()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    rounded, whole = (
        serve(out, mode, dtype=torch.float32, device="cpu")(input_ids=sequences().tokens).logits
        for mode in ("declared", "none")
    )
    torch.testing.assert_close(rounded, whole, rtol=0, atol=1e-4 * whole.abs().max().item())


def test_a_group_shares_the_first_half(llama, tmp_path, text, capsys):
    out = tmp_path / "out"
    weights = written(llama, out, *SVD, "--text", text, *SHORT)
    assert "No engine serves SVDQuant yet: measure it" in capsys.readouterr().out
    assert weights.ranks == dict.fromkeys(weights.quantized, 8)
    tensors = load_file(out / "model.safetensors")
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                  ("mlp.gate_proj", "mlp.up_proj")):  # fmt: skip
        first, *others = (f"model.layers.1.{name}" for name in group)
        assert tensors[first + DOWN].any()
        for other in others:
            assert torch.equal(tensors[first + DOWN], tensors[other + DOWN])
            assert not torch.equal(tensors[first + UP][:8], tensors[other + UP][:8])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "NVFP4_SVD"
    assert "input_activations" not in config["config_groups"]["group_0"]


def test_the_plan_knows_their_sizes(llama, tmp_path, text, capsys):
    assert quantize(llama, tmp_path / "none", *SVD, "--dry-run", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert quantize(llama, tmp_path / "out", *SVD, "--text", text, *SHORT) == 0
    assert planned["disk_bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    (up,) = (t for t in planned["tensors"] if t["name"] == "model.layers.0.mlp.up_proj.weight")
    n, k = up["shape"]
    assert up["bytes"] == n * k // 2 + n * k // 16 + 4 + 2 * 8 * (n + k)


def plan(folder: Path, **values: object) -> Plan:
    recipe = Recipe(layout="modelopt", method="svd", rank=8, **values)  # type: ignore[arg-type]
    return plan_quantize(open_checkpoint(folder), recipe, model="m", arch_spec=None, strict=False)


def sequences() -> Sequences:
    generator = torch.Generator().manual_seed(3)
    return Sequences(torch.randint(0, 256, (8, 32), generator=generator), {"text": "drawn"})


def inputs(folder: Path, tokens: Tensor) -> dict[str, float]:
    """The largest magnitude of the inputs of every linear layer of the model as it is served."""
    model = load(folder, dtype=torch.float32, device="cpu")
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.__setitem__(name, args[0].abs().max().item())
            )
    with torch.no_grad():
        as_served(model, folder, "declared")(input_ids=tokens, use_cache=False)
    return found


@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_later_matrices_are_calibrated_with_the_branches_of_earlier_ones(llama, tmp_path, scheme):
    """The inputs that calibration has seen are those of the written model."""
    shown, out = sequences(), tmp_path / "out"
    list(pipeline.run(plan(llama, scheme=scheme), out, shown=shown))
    measuring = pipeline.measure(plan(llama, scheme=scheme), shown, "cpu")
    statistics: Statistics | None = None
    while statistics is None:
        try:
            next(measuring)
        except StopIteration as end:
            statistics = end.value
    found, without = inputs(out, shown.tokens), inputs(llama, shown.tokens)
    module = "model.layers.1.mlp.down_proj"
    assert statistics.inputs[module].amax == pytest.approx(found[module], rel=1e-4)
    assert found[module] != pytest.approx(without[module], rel=1e-3)


def test_a_killed_run_is_continued_to_the_same_bytes(llama, tmp_path):
    shown = sequences()
    small = plan(llama, max_shard_size="60KB")
    list(pipeline.run(small, tmp_path / "whole", shown=shown))
    stopped = pipeline.run(small, tmp_path / "stopped", shown=shown)
    for event in stopped:
        if event.stage == "layer 1":
            break
    stopped.close()
    assert len(list((tmp_path / "stopped").glob("*.safetensors"))) > 0
    list(pipeline.run(small, tmp_path / "stopped", resume=True, shown=shown))
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_a_matrix_of_zeros_has_a_branch_of_zeros(llama, tmp_path, text):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = written(folder, tmp_path / "out", *SVD, "--text", text, *SHORT)
    assert weights.ranks[name] == 8
    assert not weights.tensor(f"{name}.weight").any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--layout", "torchao"), "The torchao layout cannot hold the low-rank branches"),
        (("--layout", "compressed-tensors"), "use --layout modelopt, or another --method"),
        (("--rank", "65"), "qkv_proj has no branch of rank 65, since the smaller side of its"),
        (("--stats", "stats"), "svd needs the text itself: leave it out"),
        (("--method", "gptq", "--strict"), "--rank does nothing with --method gptq: leave it out"),
    ],
)
def test_what_cannot_be_written_is_refused(llama, tmp_path, capsys, options, sentence):
    assert quantize(llama, tmp_path / "out", *SVD, *options, "--dry-run") == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1025"])
def test_a_rank_without_sense_is_refused(llama, tmp_path, capsys, rank):
    assert quantize(llama, tmp_path / "out", *SVD, "--rank", rank) == 2
    assert f"--rank is {rank}: give a whole number from 1 to 1024" in capsys.readouterr().err


def test_convert_keeps_branches_or_refuses(llama, tmp_path, text, capsys):
    out, again = tmp_path / "out", tmp_path / "again"
    first = written(llama, out, *SVD, "--text", text, *SHORT)
    capsys.readouterr()
    assert main(["convert", str(out), str(again), "--layout", "modelopt"]) == 0
    assert "No engine serves SVDQuant yet" in capsys.readouterr().out
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, again))
    assert ours.keys() == theirs.keys()
    for name in ours:
        bits = (tensors[name].flatten().view(torch.uint8) for tensors in (ours, theirs))
        assert torch.equal(*bits), name
    for name in ("config.json", "hf_quant_config.json"):
        assert (out / name).read_bytes() == (again / name).read_bytes()
    for layout in ("torchao", "comfy", "compressed-tensors"):
        assert main(["convert", str(out), str(tmp_path / layout), "--layout", layout]) == 1
        sentence = f"low-rank branch of SVDQuant, which the {layout} layout cannot hold"
        assert sentence in capsys.readouterr().err
    assert min(first.ranks) == "model.layers.0.mlp.down_proj"


def test_halves_of_no_weight_are_not_copied(llama, tmp_path, capsys):
    out = tmp_path / "out"
    written(llama, out, "--layout", "modelopt")
    tensors = load_file(out / "model.safetensors")
    tensors[f"other{DOWN}"] = torch.ones(2, 4, dtype=torch.bfloat16)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", str(out), str(tmp_path / "again"), "--layout", "modelopt"]) == 1
    assert f"other{DOWN} beside no NVFP4 weight of its layout" in capsys.readouterr().err
