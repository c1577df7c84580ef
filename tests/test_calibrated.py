"""Checkpoints quantised by what a calibration text shows, from the command line."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
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
from nvfp4cli.recipe import Recipe
from nvfp4cli.runtime.model import load, load_tokenizer
from nvfp4cli.runtime.served import Served, cache_scales, serve
from nvfp4cli.runtime.text import tokenize

WORDS = "The harbour lay still under a thin grey mist when the first boats came home. "
SHORT = ("--sequences", "8", "--sequence-length", "32")


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 40, encoding="utf-8")
    return str(path)


def tokens(folder: Path, text: str) -> Tensor:
    """The sequences that SHORT takes of a text."""
    return tokenize(load_tokenizer(folder), Path(text).read_text())[: 8 * 32].view(8, 32)


def written(folder: Path, out: Path, *options: str) -> StoredWeights:
    assert quantize(folder, out, *options) == 0
    return open_weights(open_checkpoint(out))


def amax_of_inputs(folder: Path, text: str) -> dict[str, float]:
    """Of the first layer's normed input, which no rounding comes before."""
    model = load(folder, dtype=torch.float32, device="cpu")
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.__setitem__(name, args[0].abs().max().item())
            )
    with torch.no_grad():
        model(input_ids=tokens(folder, text), use_cache=False)
    return found


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_input_scales_are_those_of_the_text(llama, tmp_path, text, layout):
    out = tmp_path / "out"
    weights = written(llama, out, "--layout", layout, "--scheme", "w4a4", "--text", text, *SHORT)
    assert weights.activations
    amax = amax_of_inputs(llama, text)
    qkv = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    for name in qkv:
        assert weights.input_scale(name).multiplier == pytest.approx(amax[name] / 2688, rel=1e-5)
    for group in (qkv, [f"model.layers.1.mlp.{name}" for name in ("gate_proj", "up_proj")]):
        assert len({weights.input_scale(name) for name in group}) == 1
    assert main(["inspect", str(out), "--strict"]) == 0


def test_experts_of_a_layer_share_their_input_scales(tiny_model, tmp_path, text, capsys):
    """One of them is reached by no token."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("gpt_oss"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.router.bias"][1] = -1e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stats = tmp_path / "stats.safetensors"
    same = ("--scheme", "w4a4", "--text", text, *SHORT)
    assert main(["calibrate", str(folder), str(stats), *same, "--device", "cpu"]) == 0
    direct = written(folder, tmp_path / "direct", "--layout", "modelopt", *same)
    said = capsys.readouterr().err
    assert "No token of the calibration text has reached model.layers.0.mlp.experts.1." in said
    again = ("--layout", "modelopt", "--scheme", "w4a4", "--stats", str(stats))
    for weights in (direct, written(folder, tmp_path / "again", *again)):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            names = [n for n in weights.quantized if re.search(rf"layers\.0\.mlp.*\.{leaf}$", n)]
            assert len(names) > 2
            (scale,) = {weights.input_scale(name).multiplier for name in names}
            largest = max(Statistics.load(stats).inputs[name].amax for name in names)
            assert 0 < scale == pytest.approx(largest / 2688, rel=1e-5)


def test_the_weights_of_rtn_do_not_depend_on_the_text(llama, tmp_path, text):
    plain = written(llama, tmp_path / "a16", "--layout", "modelopt")
    rounded = written(
        llama, tmp_path / "a4", "--layout", "modelopt", "--scheme", "w4a4", "--text", text, *SHORT
    )
    for module in plain.quantized:
        ours, theirs = (w.stored(module).weight for w in (plain, rounded))
        assert torch.equal(ours.packed, theirs.packed)
        assert ours.global_scale == theirs.global_scale


def kl(out: Path, source: Path, text: str, capsys: pytest.CaptureFixture[str], *more: str) -> float:
    argv = ["eval", str(out), "--ppl", "--baseline", str(source), "--text", text, "--context", "32"]
    capsys.readouterr()
    assert main([*argv, "--device", "cpu", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)["kl_divergence"]


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt2"])
def test_what_the_text_shows_brings_the_model_nearer(
    tiny_model, tmp_path, text, capsys, model_type
):
    source = tiny_model(model_type)
    found = {}
    for method in ("rtn", "mse", "mse-block", "gptq"):
        out = tmp_path / method
        written(source, out, "--layout", "modelopt", "--method", method, "--text", text, *SHORT)
        found[method] = kl(out, source, text, capsys)
    assert found["gptq"] < 0.8 * found["mse"] < 0.8 * found["rtn"]
    assert found["gptq"] < 0.8 * found["mse-block"] < 0.8 * found["rtn"]


def test_activations_that_are_declared_are_rounded(llama, tmp_path, text, capsys):
    out = tmp_path / "out"
    written(llama, out, "--layout", "modelopt", "--scheme", "w4a4", "--text", text, *SHORT)
    as_declared, better, none = (
        kl(out, llama, text, capsys, "--activations", mode)
        for mode in ("declared", "four-over-six", "none")
    )
    assert none < 0.9 * as_declared
    assert better != as_declared
    model = serve(out, "declared", dtype=torch.float32, device="cpu")
    assert isinstance(model, Served)
    assert not isinstance(serve(out, "none", dtype=torch.float32, device="cpu"), Served)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_scales_of_the_cache_are_those_of_keys_and_values(llama, tmp_path, text, layout):
    out = tmp_path / "out"
    weights = written(
        llama, out, "--layout", layout, "--kv-cache", "fp8", "--text", text, *SHORT,
        "--ignore", "*.layers.0.*",
    )  # fmt: skip
    scales = cache_scales(weights)
    assert sorted(scales) == [0, 1]
    model = load(llama, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        kept = model(input_ids=tokens(llama, text), use_cache=True).past_key_values.layers[0]
    expected = [x.abs().max().item() / 448 for x in (kept.keys, kept.values)]
    assert list(scales[0]) == pytest.approx(expected, rel=1e-5)
    assert isinstance(serve(out, "declared", dtype=torch.float32, device="cpu"), Served)


def test_the_same_text_gives_the_same_bytes(llama, tmp_path, text):
    options = ("--layout", "modelopt", "--scheme", "w4a4", "--method", "gptq", "--text", text)
    for name in ("one", "two"):
        written(llama, tmp_path / name, *options, *SHORT)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_statistics_stand_for_the_text(llama, tmp_path, text):
    options = ("--scheme", "w4a4", "--method", "mse", "--kv-cache", "fp8")
    stats = tmp_path / "stats.safetensors"
    argv = ["calibrate", str(llama), str(stats), *options, "--text", text, *SHORT]
    assert main([*argv, "--device", "cpu"]) == 0
    assert Statistics.load(stats).facts["text"] == text
    assert main(argv) == 1  # the file is there
    same = ("--layout", "modelopt", *options)
    direct = written(llama, tmp_path / "direct", *same, "--text", text, *SHORT)
    again = written(llama, tmp_path / "again", *same, "--stats", str(stats))
    assert direct.checkpoint.tensors.keys() == again.checkpoint.tensors.keys()
    for name in direct.checkpoint.tensors:
        ours, theirs = (w.checkpoint.read(name).flatten() for w in (direct, again))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


def test_statistics_of_another_rotation_are_refused(llama, tmp_path, text, capsys):
    stats = str(tmp_path / "stats")
    assert main(["calibrate", str(llama), stats, "--scheme", "w4a4", "--text", text, *SHORT]) == 0
    capsys.readouterr()
    for more, sentence in (
        (("--rotate", "r2"), "was made with the rotation"),
        (("--include", "lm_head"), "know nothing of the inputs of lm_head: calibrate again"),
        (("--kv-cache", "fp8"), "know nothing of the keys of model.layers.0.self_attn"),
        (("--method", "gptq"), "gptq needs the text itself"),
        (("--method", "mse-block"), "mse-block needs the text itself"),
    ):
        out = tmp_path / "out"
        options = ("--layout", "modelopt", "--scheme", "w4a4", "--stats", stats, *more)
        assert quantize(llama, out, *options) == 1
        assert sentence in capsys.readouterr().err


def test_random_tokens_need_no_text(llama, tmp_path, text, capsys):
    out = tmp_path / "out"
    written(llama, out, "--layout", "modelopt", "--method", "mse", "--text", "random", *SHORT)
    written(llama, tmp_path / "rtn", "--layout", "modelopt")
    assert kl(out, llama, text, capsys) < kl(tmp_path / "rtn", llama, text, capsys)


def test_a_killed_run_is_continued_to_the_same_bytes(llama, tmp_path, text):
    recipe = Recipe(layout="modelopt", method="gptq", text=text, max_shard_size="60KB")
    found = Sequences(tokens(llama, text), {"text": text})

    def running(out: Path, resume: bool):
        plan = plan_quantize(
            open_checkpoint(llama), recipe, model="m", arch_spec=None, strict=False
        )
        return pipeline.run(plan, out, resume=resume, shown=found)

    list(running(tmp_path / "whole", False))
    stopped = running(tmp_path / "stopped", False)
    for event in stopped:
        if event.stage == "layer 1":
            break
    stopped.close()
    assert len(list((tmp_path / "stopped").glob("*.safetensors"))) > 0
    list(running(tmp_path / "stopped", True))
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_a_rotated_model_is_calibrated_rotated(llama, tmp_path, text, capsys):
    out = tmp_path / "out"
    options = ("--layout", "modelopt", "--method", "gptq", "--rotate", "r1r2", "--text", text)
    written(llama, out, *options, *SHORT)
    written(llama, tmp_path / "rtn", "--layout", "modelopt", "--rotate", "r1r2")
    assert kl(out, llama, text, capsys) < 0.8 * kl(tmp_path / "rtn", llama, text, capsys)


def test_the_head_is_calibrated_too(llama, tmp_path, text):
    out = tmp_path / "out"
    weights = written(
        llama, out, "--layout", "modelopt", "--scheme", "w4a4", "--include", "lm_head", "--text",
        text, *SHORT,
    )  # fmt: skip
    assert "lm_head" in weights.quantized
    assert 0 < weights.input_scale("lm_head").multiplier < 1


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_a_gpu_brings_it_as_near(llama, tmp_path, text, capsys, scheme):
    found = []
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        argv = ["quantize", str(llama), str(out), "--layout", "modelopt", "--scheme", scheme]
        argv += ["--method", "gptq", "--text", text, *SHORT, "--device", device]
        assert main(argv) == 0
        found.append(kl(out, llama, text, capsys))
    assert found[1] == pytest.approx(found[0], rel=0.1)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_inputs_that_are_not_finite_are_an_error(llama, tmp_path, text, capsys, scheme):
    """Finite weights whose products overflow."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 1e38
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 1e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    argv = (folder, out, "--layout", "modelopt", "--method", "gptq", "--text", text, *SHORT)
    assert quantize(*argv, "--scheme", scheme) == 1
    assert "are not finite on the calibration text" in capsys.readouterr().err
    assert not out.exists()


def test_a_matrix_of_zeros_is_stored_as_zeros(llama, tmp_path, text, capsys):
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = ("--layout", "modelopt", "--method", "gptq", "--scheme", "w4a4", "--text", text)
    weights = written(folder, tmp_path / "out", *options, *SHORT)
    assert not weights.tensor(f"{name}.weight").any()
    assert "holds only zeros: it is stored as zeros" in capsys.readouterr().err


def test_the_record_names_the_text(llama, tmp_path, text):
    out = tmp_path / "out"
    written(llama, out, "--layout", "modelopt", "--scheme", "w4a4", "--text", text, *SHORT)
    record = yaml.safe_load((out / "nvfp4.yaml").read_text())
    assert record["calibration"] == {
        "text": text,
        "text_sha256": hashlib.sha256(Path(text).read_bytes()).hexdigest(),
        "sequences": 8,
        "sequence_length": 32,
    }
    written(llama, tmp_path / "again", "--recipe", str(out / "nvfp4.yaml"))
    assert contents(tmp_path / "again") == contents(out)


def test_a_plan_says_what_memory_calibration_takes(llama, tmp_path, text, capsys):
    def planned(*options: str) -> int:
        argv = ["quantize", str(llama), str(tmp_path / "out"), "--dry-run", "--json", *options]
        assert main(argv) == 0
        return json.loads(capsys.readouterr().out)["calibration_memory_bytes"]

    def taken(sequences: int, *options: str) -> int:
        return planned("--text", text, "--sequences", str(sequences), *options)

    assert planned() == 0
    one, two, more = (taken(n, "--method", "gptq") for n in (64, 128, 192))
    assert 0 < two - one == more - two  # hidden states and products, of every sequence
    assert taken(64, "--scheme", "w4a4") < one  # one model instead of two
    argv = ["quantize", str(llama), str(tmp_path / "out"), "--dry-run", "--method", "gptq"]
    assert main([*argv, "--text", text]) == 0
    assert "Calibration on 128 sequences of 512 tokens takes up to" in capsys.readouterr().out


def test_options_that_do_nothing_are_said(llama, tmp_path, text, capsys):
    for options, sentence in (
        (("--text", text), "--text does nothing where nothing is calibrated"),
        (("--scales", "rtn"), "--scales does nothing with --method rtn"),
        (("--sequences", "9", "--method", "mse"), "--sequences does nothing where nothing is"),
    ):
        assert quantize(llama, tmp_path / "out", "--strict", *options) == 1
        assert sentence in capsys.readouterr().err
    random = ("--method", "mse", "--text", "random", "--seed", "3", "--dry-run", "--strict")
    assert quantize(llama, tmp_path / "out", *random) == 0
