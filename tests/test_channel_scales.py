"""Channel scales, from the command line: exact, and better where channels are uneven."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from command import contents, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli.calibrate import channels as search
from nvfp4cli.check.compare import distance
from nvfp4cli.checkpoint.files import CHANNELS
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import channels, fold
from nvfp4cli.runtime.model import load

SHORT = ("--text", "random", "--sequences", "8", "--sequence-length", "32")
QKV = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def uneven(llama: Path, tmp_path: Path) -> Path:
    """A model with one channel in 16 that norms enlarge and readers take less of."""
    folder = tmp_path / "uneven"
    folder.mkdir()
    for file in llama.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(llama / "model.safetensors")
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name][::16] *= 32
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight",
                          "gate_proj.weight", "up_proj.weight")):  # fmt: skip
            tensors[name][:, ::16] /= 32
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def factors(out: Path) -> dict[str, Tensor]:
    return channels.from_bytes((out / CHANNELS).read_bytes(), CHANNELS)


def changed(source: Path, found: dict[str, Tensor], **recipe: str) -> dict[str, Tensor]:
    """The tensors of a model whose channels are scaled, unquantised and in their own dtypes."""
    wish = Recipe(layout="modelopt", channel_scales=True, **recipe)
    plan = plan_quantize(open_checkpoint(source), wish, model="", arch_spec=None, strict=False)
    edits = channels.edits(plan.facts.scalings, found)
    tensors = load_file(source / "model.safetensors")
    for name, own in edits.items():
        wide = fold.apply(tensors[name], own, tensors.__getitem__)
        tensors[name] = wide.to(tensors[name].dtype)
    return tensors


def kl(out: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> float:
    text = out.parent / "text.txt"
    text.write_text(Path(__file__).read_text())
    argv = ["eval", str(out), "--ppl", "--baseline", str(source), "--context", "32", "--json"]
    capsys.readouterr()
    assert main([*argv, "--text", str(text), "--device", "cpu"]) == 0
    return yaml.safe_load(capsys.readouterr().out)["kl_divergence"]


def test_factors_are_exact_in_bf16(uneven, tmp_path):
    """The scaled model, rounded to bf16 again, computes the same logits bit for bit."""
    assert quantize(uneven, tmp_path / "q", "--method", "awq", "--layout", "modelopt", *SHORT) == 0
    found = factors(tmp_path / "q")
    for one in found.values():
        assert torch.equal(one.log2(), one.log2().round())
        assert one.unique().numel() > 1
    out = tmp_path / "scaled"
    out.mkdir()
    (out / "config.json").write_bytes((uneven / "config.json").read_bytes())
    tensors = changed(uneven, found)
    assert not torch.equal(tensors[NORM], load_file(uneven / "model.safetensors")[NORM])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        before, after = (
            load(folder, dtype=torch.float32, device="cpu")(input_ids=ids).logits
            for folder in (uneven, out)
        )
    assert distance(before, after) < 1e-6  # powers of two, but sums may be in another order


@pytest.mark.parametrize("scheme", ["w4a16", "w4a4"])
def test_uneven_channels_are_evened_out(uneven, tmp_path, capsys, scheme):
    found = {}
    for name, option in (("plain", "--no-channel-scales"), ("scaled", "--channel-scales")):
        out = tmp_path / name
        text = SHORT if name == "scaled" or scheme == "w4a4" else ()
        options = ("--scheme", scheme, "--layout", "modelopt", option)
        assert quantize(uneven, out, *options, *text) == 0
        assert main(["inspect", str(out), "--strict", "--against", str(uneven)]) == 0
        found[name] = kl(out, uneven, capsys)
    assert found["scaled"] < 0.7 * found["plain"]
    assert not (tmp_path / "plain" / CHANNELS).exists()
    # Made small where the norm is large, and the other way round.
    own = factors(tmp_path / "scaled")["model.layers.0.input_layernorm"]
    assert own[::16].min() > own[1:16].max()


@pytest.mark.parametrize("model_type", ["gemma", "opt", "phi3", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("rotate", ["none", "r1"])
def test_every_kind_of_norm_and_reader(tiny_model, tmp_path, capsys, model_type, rotate):
    source, out = tiny_model(model_type), tmp_path / "out"
    options = ("--scheme", "w4a4", "--layout", "compressed-tensors", "--channel-scales")
    assert quantize(source, out, *options, "--rotate", rotate, *SHORT) == 0
    assert main(["inspect", str(out), "--strict", "--against", str(source)]) == 0
    assert factors(out) or rotate == "r1"
    assert 0 < kl(out, source, capsys) < 0.2


def test_gains_of_one_plus_w_are_met_as_stored(tiny_model, tmp_path):
    """bf16 rounds w, and the columns take what it has become."""
    source, out = tiny_model("gemma"), tmp_path / "out"
    assert quantize(source, out, "--method", "awq", "--layout", "modelopt", *SHORT) == 0
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    own = factors(out)
    norms = [name for name in own if name.endswith("norm")]
    assert norms
    for name in norms:
        gain, now = (1 + tensors[f"{name}.weight"].double() for tensors in (before, after))
        torch.testing.assert_close(now * own[name], gain, rtol=1e-6, atol=0)


def test_the_same_bytes_again_and_in_the_other_layout(llama, tmp_path):
    options = ("--scheme", "w4a4", "--channel-scales", "--bits", "5.5", *SHORT)
    for name, layout in (("a", "modelopt"), ("b", "modelopt"), ("c", "compressed-tensors")):
        assert quantize(llama, tmp_path / name, "--layout", layout, *options) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    converted = tmp_path / "converted"
    argv = ["convert", str(tmp_path / "c"), str(converted), "--layout", "modelopt"]
    assert main(argv) == 0
    assert (converted / CHANNELS).read_bytes() == (tmp_path / "a" / CHANNELS).read_bytes()
    assert main(["inspect", str(converted), "--strict", "--against", str(llama)]) == 0


def test_a_quantised_source_brings_no_factors_of_its_own(llama, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert quantize(llama, first, "--method", "awq", "--layout", "modelopt", *SHORT) == 0
    assert quantize(first, second, "--layout", "modelopt") == 0
    assert (first / CHANNELS).exists() and not (second / CHANNELS).exists()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"nonsense", "nvfp4.channels is damaged"),
        (channels.to_bytes({"model.nothing": torch.ones(4)}), "of model.nothing, which the model"),
    ],
)
def test_a_damaged_file_of_factors_is_one_sentence(llama, tmp_path, capsys, data, sentence):
    out = tmp_path / "out"
    assert quantize(llama, out, "--method", "awq", "--layout", "modelopt", *SHORT) == 0
    (out / CHANNELS).write_bytes(data)
    assert main(["inspect", str(out), "--against", str(llama)]) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_statistics_of_another_run_do_not_do(llama, tmp_path, capsys):
    options = ("--layout", "modelopt", "--channel-scales", "--stats", str(tmp_path / "x"))
    assert quantize(llama, tmp_path / "out", *options) != 0
    assert "leave out one of them" in " ".join(capsys.readouterr().err.split())


def test_ones_are_kept_where_nothing_is_better():
    """A weight and inputs that NVFP4 holds exactly cannot gain."""
    weight = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6, -6]).repeat(16, 4)
    x = torch.tensor([6.0, -3.0]).repeat(64, 16)
    inputs = search._Inputs(1)
    inputs.add(x)
    assert search._best([weight], inputs, None, static=True) is None
    assert search._best([weight], search._Inputs(1), None, static=True) is None


def test_channels_that_are_made_by_one_get_one_factor():
    generator = torch.Generator().manual_seed(0)
    inputs = search._Inputs(1)
    inputs.add(torch.randn(256, 64, generator=generator) * torch.rand(64, generator=generator) ** 4)
    made_by = tuple(range(32)) * 2
    weight = torch.randn(48, 64, generator=generator)
    found = search._best([weight], inputs, made_by, static=True)
    assert found is not None and torch.equal(found[:32], found[32:])
