"""Runs from checkpoint to checkpoint: values and files, on the host and the way of a GPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import contents, quantize
from late import STAGED, shrink, stage
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli import pipeline
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.formats import nvfp4
from nvfp4cli.layouts import LAYOUTS, StoredWeights, open_weights
from nvfp4cli.pipeline import Event
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe

DOWN = "model.layers.0.mlp.down_proj.weight"
HEAD = "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"
GAIN = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
Edit = Callable[[dict[str, Tensor]], None]


def altered(model: Path, folder: Path, edit: Edit) -> Path:
    """A copy of a single-file checkpoint with its tensors edited in place."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantized(model: Path, out: Path, *options: str) -> StoredWeights:
    assert quantize(model, out, *options) == 0
    return open_weights(open_checkpoint(out))


def convert(checkpoint: Path, out: Path) -> int:
    return main(["convert", str(checkpoint), str(out), "--layout", "comfy"])


@pytest.fixture(params=["host", "staged"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands compute on the host, and then the way of a GPU."""
    if request.param == "staged":
        stage(monkeypatch)


@pytest.fixture
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", vocab=264)


# Values


def test_all_layouts_decode_to_the_same_bits(llama, tmp_path):
    decoded = []
    for layout in LAYOUTS:
        weights = quantized(llama, tmp_path / layout, "--layout", layout)
        assert weights.layout is LAYOUTS[layout]
        decoded.append({name: weights.tensor(name) for name in weights.names})
    assert decoded[0].keys() == load_file(llama / "model.safetensors").keys()
    for other in decoded[1:]:
        assert all(torch.equal(decoded[0][name], other[name]) for name in decoded[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.usefixtures("both_ways")
def test_each_group_is_the_reference_at_its_maximum(dtype, tiny_model, tmp_path):
    model = tiny_model("llama", vocab=264, dtype=dtype)
    weights = quantized(model, tmp_path / "out", "--layout", "modelopt")
    source = load_file(model / "model.safetensors")
    groups = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
              ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))  # fmt: skip
    for layer in range(2):
        for group in groups:
            modules = [f"model.layers.{layer}.{name}" for name in group]
            tensors = [source[f"{module}.weight"].float() for module in modules]
            scale = nvfp4.GlobalScale.from_amax(max(t.abs().max().item() for t in tensors))
            for module, tensor in zip(modules, tensors, strict=True):
                expected, stored = nvfp4.quantize(tensor, scale), weights.stored(module).weight
                assert torch.equal(stored.packed, expected.packed)
                assert torch.equal(nvfp4.dequantize(stored), nvfp4.dequantize(expected))


def test_groups_across_files(tiny_model, tmp_path):
    """One global scale for each group, from its maximum, wherever its members lie."""
    amax = {"q": 0.5, "k": 4.0, "v": 1.0, "gate": 1.0, "up": 8.0}

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if (part := name.split(".")[-2].removesuffix("_proj")) in amax:
                tensor.mul_(amax[part] / tensor.abs().max()).clamp_(-amax[part], amax[part])
                tensor[0, 0] = amax[part]

    single = altered(tiny_model("llama", vocab=264), tmp_path / "single", edit)
    tensors = load_file(single / "model.safetensors")
    dealt = tmp_path / "dealt"
    shutil.copytree(single, dealt)
    (dealt / "model.safetensors").unlink()
    first = {name: t for name, t in tensors.items() if "q_proj" in name or "up_proj" in name}
    second = {name: t for name, t in tensors.items() if name not in first}
    weight_map = dict.fromkeys(first, "b.safetensors") | dict.fromkeys(second, "a.safetensors")
    save_file(first, dealt / "b.safetensors", metadata={"format": "pt"})
    save_file(second, dealt / "a.safetensors", metadata={"format": "pt"})
    (dealt / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    weights = quantized(dealt, tmp_path / "from-dealt", "--layout", "modelopt")
    quantized(single, tmp_path / "from-single", "--layout", "modelopt")
    a, b = contents(tmp_path / "from-dealt"), contents(tmp_path / "from-single")
    a.pop("nvfp4.yaml"), b.pop("nvfp4.yaml")  # they name the source
    assert a == b
    for module in weights.quantized:
        part = module.rpartition(".")[2].removesuffix("_proj")
        group = 4.0 if part in "qkv" else 8.0
        if part in amax:
            multiplier = weights.stored(module).weight.global_scale.multiplier
            assert multiplier == nvfp4.GlobalScale.from_amax(group).multiplier


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("both_ways")
def test_zero_tensors(layout, llama, tmp_path, capsys):
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN].zero_()
        tensors[UP][5, 16:32] = 0

    source = load_file(llama / "model.safetensors")
    assert source[UP][5, 16:32].abs().max() < source[UP].abs().max()
    before = quantized(llama, tmp_path / "before", "--layout", layout)
    model = altered(llama, tmp_path / "model", edit)
    capsys.readouterr()
    after = quantized(model, tmp_path / "after", "--layout", layout)
    assert f"{DOWN} holds only zeros" in capsys.readouterr().err
    down = after.stored(DOWN.removesuffix(".weight")).weight
    assert down.global_scale.multiplier > 0
    assert not after.tensor(DOWN).any()
    for module in after.quantized:
        scales = after.stored(module).weight.block_scale.view(torch.uint8)
        assert not (scales & 0x7F == 0x7F).any()
    expected = before.tensor(UP)
    expected[5, 16:32] = 0
    assert torch.equal(after.tensor(UP), expected)


FOLD = ("--scheme", "none", "--rotate", "r1")


@pytest.mark.parametrize(
    ("name", "index", "value", "options"),
    [
        (Q, (5, 7), torch.nan, ()),
        (K, (0, 0), torch.inf, ()),
        (Q, (5, 7), torch.nan, ("--rotate", "r1r2")),
        (DOWN, (3, 100), -torch.inf, ("--rotate", "r1")),
        (GAIN, (9,), torch.nan, ("--rotate", "r1")),
        (EMBEDDING, (200, 31), torch.nan, ("--rotate", "r1")),
        (Q, (5, 7), torch.nan, FOLD),
        (DOWN, (3, 100), -torch.inf, FOLD),
        (GAIN, (9,), torch.nan, FOLD),
        (EMBEDDING, (200, 31), torch.nan, FOLD),
        # Copied as they are.
        (GAIN, (9,), -torch.inf, ()),
        (EMBEDDING, (200, 31), torch.nan, ()),
        (HEAD, (3, 3), torch.nan, ()),  # the last job: its error has no successor to meet it
    ],
)
@pytest.mark.usefixtures("both_ways")
def test_nan_and_inf(name, index, value, options, llama, tmp_path, capsys):
    """Named where they lie in the source, not where a rotation has spread them to."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name][index] = value

    model = altered(llama, tmp_path / "model", edit)
    out = tmp_path / "new" / "out"
    assert quantize(model, out, *options) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"error: {name} holds 1 value that is NaN or Inf")
    assert f"at index {list(index)}" in message
    assert not out.parent.exists()


@pytest.mark.usefixtures("both_ways")
def test_a_damaged_weight_may_be_ignored(llama, tmp_path):
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[Q][5, 7] = torch.nan

    model = altered(llama, tmp_path / "model", edit)
    attention = "model.layers.0.self_attn.?_proj"
    after = quantized(model, tmp_path / "out", "--ignore", attention)
    assert after.tensor(Q)[5, 7].isnan()
    assert convert(tmp_path / "out", tmp_path / "other") == 0


def test_convert_refuses_a_copied_value_that_is_not_finite(llama, tmp_path, capsys):
    quantized(llama, tmp_path / "out")

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[GAIN][9] = torch.inf

    model = altered(tmp_path / "out", tmp_path / "damaged", edit)
    assert convert(model, tmp_path / "other") == 1
    assert f"{GAIN} holds 1 value that is NaN or Inf" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("rotate", ["none", "r1"])
@pytest.mark.usefixtures("both_ways")
def test_values_beyond_fp32(rotate, tiny_model, tmp_path, capsys):
    """Finite in the source, infinite where NVFP4 is computed."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[UP][1, 1] = 1e300

    model = altered(tiny_model("llama", vocab=264, dtype=torch.float64), tmp_path / "model", edit)
    assert quantize(model, tmp_path / "out", "--rotate", rotate) == 1
    assert f"{UP} leaves the range of float32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("both_ways")
def test_dtype_of_what_is_kept(target, source, tiny_model, tmp_path):
    model, out = tiny_model("llama", vocab=264, dtype=source), tmp_path / "out"
    weights = quantized(model, out, "--dtype", target, "--layout", "modelopt")
    before, dtype = load_file(model / "model.safetensors"), getattr(torch, target)
    assert weights.plain
    for name in weights.plain:
        assert torch.equal(weights.tensor(name), before[name].to(dtype))
        assert weights.tensor(name).dtype == dtype
    assert json.loads((out / "config.json").read_text())["dtype"] == target


@pytest.mark.usefixtures("both_ways")
def test_fp16_that_does_not_hold_a_kept_tensor(llama, tmp_path, capsys):
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[EMBEDDING][3, 3] = 1e6

    model = altered(llama, tmp_path / "model", edit)
    assert quantize(model, tmp_path / "out", "--dtype", "float16") == 1
    assert f"{EMBEDDING} leaves the range of float16" in capsys.readouterr().err


# Files


def test_sidecars_are_kept_and_stale_files_are_not(tiny_model, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model("llama", vocab=264, shards=3), model)
    kept = {
        "LICENSE": b"licence\r\n",
        "modeling_nova.py": b"print('remote')\n",
        "assets/logo.png": bytes(range(256)),
        "generation_config.json": b'{"temperature": 1 }',
    }
    stale = {
        "hf_quant_config.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "pytorch_model.bin.index.json": b"{}",
        "original/consolidated.00.pth": b"x",
        ".cache/lock": b"",
    }
    for name, data in (kept | stale).items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(data)
    assert quantize(model, out) == 0
    written = contents(out)
    assert {name: written.get(name) for name in kept} == kept
    tokenizer = {name for name in contents(model) if "token" in name or "template" in name}
    assert len(tokenizer) >= 2
    assert all(written[name] == (model / name).read_bytes() for name in tokenizer)
    made = {"model.safetensors", "config.json", "nvfp4.yaml"}
    assert written.keys() == kept.keys() | tokenizer | made


def test_index_is_exact(llama, tmp_path):
    out = tmp_path / "out"
    quantized(llama, out, "--max-shard-size", "20KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    assert len(files) > 3
    assert index["weight_map"] == {n: file for file, tensors in files.items() for n in tensors}
    stored = [t for tensors in files.values() for t in tensors.values()]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored)


def plan_for(model: Path, **recipe: object) -> Plan:
    return plan_quantize(
        open_checkpoint(model), Recipe(**recipe), model="m", arch_spec=None, strict=False
    )


@pytest.mark.parametrize("place", ["cpu", STAGED])
@pytest.mark.parametrize("rotate", ["none", "r1r2"])
def test_events_add_up(rotate, place, tiny_model, tmp_path, monkeypatch):
    shrink(monkeypatch)
    plan = plan_for(tiny_model("llama", vocab=264, tie=True), rotate=rotate)
    every = list(pipeline.run(plan, tmp_path / "out", device=place))
    events = [event for event in every if event.kind == "progress"]
    done = [event.done for event in events]
    assert done == sorted(done)
    assert len(events) == len(plan.jobs)
    assert events[-1] == Event("progress", plan.source_bytes, plan.source_bytes, "head")
    if place == STAGED:
        assert every[-1].kind == "summary"
        assert 0 < every[-1].computing < 1
        assert 0 < every[-1].copying < 1
