"""Folds preserve the function: the logits of the written checkpoint are those of its source.

In float64 a right fold is exact to 1e-14 and each fault that tools of this kind have had moves
the logits by more than 1e-2, so no tolerance is in doubt.
"""

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli.app import main
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.formats import nvfp4
from nvfp4cli.layouts import open_weights
from nvfp4cli.layouts.record import Contents
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import Claim
from nvfp4cli.plan.assemble import _config
from nvfp4cli.recipe import Recipe
from nvfp4cli.rotate import fold
from nvfp4cli.rotate.fold import Edit, Rotations, ScaleColumns
from nvfp4cli.rotate.hadamard import Rotation

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
EXACT = 1e-12
WRONG = 1e-2

# Sizes: powers of two, 12 * 2^k, 20 * 2^k, 36 * 2^k; head_dim both hidden / heads and its own.
MODELS = {
    "llama": ("llama", {"hidden": 48}),
    "llama tied": ("llama", {"tie": True}),
    "llama biased": (
        "llama",
        {"hidden": 144, "heads": 9, "kv_heads": 3, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {"hidden": 80, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"hidden": 112, "heads": 7, "kv_heads": 1, "tie": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"hidden": 144, "heads": 9, "kv_heads": 3, "tie": True}),
    "granite": ("granite", {"hidden": 48, "heads": 6, "tie": True, "attention_bias": True}),
}


class _WideTorch(types.ModuleType):
    """torch for transformers' modules, in which every cast to fp32 is one to fp64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes in float64 throughout, norms and rotary embeddings included."""
    for model_type in MODEL_TYPES:
        importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    importlib.import_module("transformers.integrations.sdpa_attention")
    for name, module in list(sys.modules.items()):
        ours = name.startswith(("transformers.models.", "transformers.integrations."))
        if (ours or name == "transformers.modeling_rope_utils") and "torch" in vars(module):
            monkeypatch.setattr(module, "torch", _WideTorch("torch"))
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def logits(folder: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    tokens = torch.arange(24).remainder(7).mul(37).view(2, 12)  # [2, 12]
    with torch.no_grad():
        result = model(tokens, use_cache=False).logits
    assert result.dtype == dtype
    return result


def distance(a: Path, b: Path, dtype: torch.dtype = torch.float64) -> float:
    """max |d logit| / max |logit|"""
    reference = logits(a, dtype)
    return ((logits(b, dtype) - reference).abs().max() / reference.abs().max()).item()


def fold_to(source: Path, out: Path, *options: str) -> Path:
    argv = ["quantize", str(source), str(out), "--device", "cpu", *options]
    assert main(argv if "--scheme" in options else [*argv, "--scheme", "none"]) == 0
    return out


@pytest.fixture
def source(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    def make(name: str, dtype: torch.dtype = torch.float64) -> Path:
        model_type, shape = MODELS[name]
        return tiny_model(model_type, dtype=dtype, vocab=264, **shape)

    return make


@pytest.mark.parametrize("rotate", ["r1", "r2", "r1r2"])
@pytest.mark.parametrize("name", MODELS)
def test_fold_is_exact(name, rotate, source, tmp_path, wide):
    out = fold_to(source(name), tmp_path / "out", "--rotate", rotate)
    assert distance(source(name), out) < EXACT


@pytest.mark.parametrize("kind", ["block-16", "block-32", "qr"])
def test_every_kind_is_exact(kind, tiny_model, tmp_path, wide):
    shape = {"hidden": 96, "heads": 3, "kv_heads": 3, "vocab": 264}
    model = tiny_model("qwen2", dtype=torch.float64, **shape)
    out = fold_to(model, tmp_path / "out", "--rotate", "r1r2", "--rotation-kind", kind)
    assert distance(model, out) < EXACT


def test_without_rotation_nothing_changes(source, tmp_path):
    model = source("llama biased", torch.bfloat16)
    out = fold_to(model, tmp_path / "out")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_fold_in_fp32(source, tmp_path):
    model = source("llama biased", torch.float32)
    out = fold_to(model, tmp_path / "out", "--rotate", "r1r2")
    # 2.3e-6 was measured on a whole model of 30 layers.
    assert distance(model, out, torch.float32) < 1e-5


# Faults, each the only change to right edits.


@dataclass(frozen=True)
class Centre:
    """Subtracts the mean of each row, which is right for LayerNorm only."""

    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: fold.Read) -> Tensor:
        return x - x.mean(dim=-1, keepdim=True)


@dataclass(frozen=True)
class InterleavedHeads:
    """o_proj as if query head h were served by KV head h % kv."""

    rotations: tuple[Rotation, ...]
    row_local = True
    reads: tuple[str, ...] = ()

    def apply(self, x: Tensor, read: fold.Read) -> Tensor:
        kv = len(self.rotations)
        heads = x.view(x.shape[0], -1, kv, self.rotations[0].size)  # [N, group, kv, d]
        return torch.stack(
            [r.apply_right(heads[:, :, j]) for j, r in enumerate(self.rotations)], dim=2
        ).view_as(x)


Fault = Callable[[Claim, tuple[Edit, ...]], tuple[Edit, ...]]


def without(kind: type, matches: Callable[[Claim], bool]) -> Fault:
    return lambda claim, edits: tuple(
        e for e in edits if not (matches(claim) and isinstance(e, kind))
    )


def first(edit: Edit, matches: Callable[[Claim], bool]) -> Fault:
    return lambda claim, edits: (edit, *edits) if matches(claim) else edits


def swapped(make: Callable[[tuple[Rotation, ...]], Edit]) -> Fault:
    return lambda claim, edits: tuple(
        make(e.rotations) if isinstance(e, fold.RotateHeadColumns) else e for e in edits
    )


FAULTS: dict[str, tuple[str, Fault]] = {
    "bias of a writer not rotated": (
        "llama biased",
        without(fold.RotateRight, lambda c: c.spec.role == "writer" and c.part == "bias"),
    ),
    "bias of v not rotated": (
        "qwen2",
        without(fold.RotateHeadRows, lambda c: c.part == "bias"),
    ),
    "gain not folded": ("llama", without(ScaleColumns, lambda c: c.module.endswith("up_proj"))),
    "final gain folded into a tied embedding": (
        "llama tied",
        first(ScaleColumns(("model.norm.weight",), 0.0), lambda c: c.spec.role == "embed"),
    ),
    "embedding centred": ("llama", first(Centre(), lambda c: c.spec.role == "embed")),
    "R2 of another head": (
        "llama",
        swapped(lambda rotations: fold.RotateHeadColumns(rotations[::-1])),
    ),
    "heads mapped h % kv": ("llama", swapped(InterleavedHeads)),
    "gain kept in the norm": ("llama", without(fold.Fill, lambda c: c.module == "model.norm")),
    "router-like reader forgotten": (
        "llama",
        without(fold.RotateRight, lambda c: c.module.endswith("layers.1.mlp.gate_proj")),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_known_faults_would_be_seen(fault, source, tmp_path, wide, monkeypatch):
    name, spoil = FAULTS[fault]
    right = fold.edits

    def wrong(claim: Claim, *rest: object) -> tuple[Edit, ...]:
        return spoil(claim, right(claim, *rest))

    monkeypatch.setattr(fold, "edits", wrong)
    out = fold_to(source(name), tmp_path / "out", "--rotate", "r1r2")
    assert distance(source(name), out) > WRONG


def shards(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_same_seed_same_bytes(tiny_model, tmp_path, two_threads):
    model = tiny_model("llama", hidden=384, intermediate=768, layers=1, vocab=512)
    options = ("--rotate", "r1r2", "--scheme", "w4a16", "--layout", "modelopt")
    threaded = shards(fold_to(model, tmp_path / "two", *options))
    torch.set_num_threads(1)
    assert shards(fold_to(model, tmp_path / "one", *options)) == threaded
    assert shards(fold_to(model, tmp_path / "other", *options, "--seed", "1")) != threaded


@pytest.mark.parametrize("rotate", ["r1", "r2"])
def test_seed_reaches_each_rotation(rotate, source, tmp_path):
    model = source("llama", torch.bfloat16)
    a = fold_to(model, tmp_path / "a", "--rotate", rotate)
    b = fold_to(model, tmp_path / "b", "--rotate", rotate, "--seed", "7")
    assert shards(a) != shards(b)


def test_heads_and_layers_have_their_own_rotation(source):
    config, llama = open_checkpoint(source("llama")).config, specs.load("llama")
    rotations = Rotations.of("r2", "hadamard", 0, llama, llama.sizes(config))
    signs = [tuple(r.signs.tolist()) for n in range(2) for r in rotations.value_path(n)]
    assert len(set(signs)) == len(signs) == 4


def test_r1_leaves_neutral_norms_and_an_untied_head(source, tmp_path):
    out = fold_to(source("llama tied", torch.bfloat16), tmp_path / "out", "--rotate", "r1")
    tensors = load_file(out / "model.safetensors")
    norms = [name for name in tensors if "norm" in name]
    assert len(norms) == 5
    assert all(bool((tensors[name] == 1).all()) for name in norms)
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_r2_alone_keeps_the_tie_and_the_gains(source, tmp_path):
    model = source("llama tied", torch.bfloat16)
    out = fold_to(model, tmp_path / "out", "--rotate", "r2")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {"v_proj", "o_proj"}
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


def test_head_norms_stay(source, tmp_path):
    model = source("qwen3", torch.bfloat16)
    out = fold_to(model, tmp_path / "out", "--rotate", "r1r2")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    kept = [name for name in before if "q_norm" in name or "k_norm" in name]
    assert len(kept) == 4
    assert all(torch.equal(before[name], after[name]) for name in kept)


def test_a_stored_copy_of_a_tied_head_is_ignored(source, tmp_path, wide):
    model = tmp_path / "model"
    model.mkdir()
    for path in source("llama tied").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    out = fold_to(model, tmp_path / "out", "--rotate", "r1")
    assert distance(source("llama tied"), out) < EXACT


def test_untied_is_said_at_both_levels_of_a_nested_config():
    nested = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}
    contents = Contents((), (), activations=False)
    config = _config(nested, Recipe(scheme="none", rotate="r1"), None, contents, untied=True)
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert nested["tie_word_embeddings"] is nested["text_config"]["tie_word_embeddings"] is True


def test_fp16_overflow_names_the_tensor(tiny_model, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model("llama", dtype=torch.float16, vocab=264).iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    # A row with a root mean square of 1e5 keeps it under any rotation.
    tensors["model.layers.1.input_layernorm.weight"].fill_(100)
    tensors["model.layers.1.self_attn.q_proj.weight"][3] = 1000
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    argv = ["quantize", str(model), str(tmp_path / "out"), "--scheme", "none", "--rotate", "r1"]
    assert main(argv) == 1
    message = capsys.readouterr().err
    assert "model.layers.1.self_attn.q_proj.weight leaves the range of float16" in message
    assert "--dtype bfloat16 or float32." in message
    assert not (tmp_path / "out").exists()
    assert main([*argv, "--dtype", "float32"]) == 0


def test_size_without_a_construction_says_what_works(tiny_model, tmp_path, capsys):
    model = tiny_model("llama", hidden=1712, head_dim=16, intermediate=32, layers=1, vocab=264)
    argv = ["quantize", str(model), str(tmp_path / "out"), "--scheme", "none", "--rotate", "r1r2"]
    assert main(argv) == 1
    message = capsys.readouterr().err
    assert "size 1712" in message
    assert "--rotation-kind block-16" in message
    assert main([*argv, "--rotation-kind", "block-16"]) == 0


def test_r2_that_does_not_fit_is_refused(tiny_model, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_model("llama", vocab=264).iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    argv = ["quantize", str(model), str(tmp_path / "out"), "--scheme", "none", "--rotate", "r2"]
    assert main(argv) == 1
    assert "model.layers.0.self_attn.k_proj.weight has shape [32, 64]" in capsys.readouterr().err


def test_norm_bias_is_refused():
    llama = specs.load("llama")
    norm = next(m for m in llama.modules if m.pattern == "model.norm")
    claim = Claim("model.norm.bias", "model.norm", "bias", norm, None)
    sizes = llama.sizes({"hidden_size": 64, "num_attention_heads": 4})
    rotations = Rotations.of("r1", "hadamard", 0, llama, sizes)
    with pytest.raises(UnsupportedError, match=r"model\.norm\.bias"):
        fold.edits(claim, llama, rotations, sizes, (64,))
    other = Rotations.of("r2", "hadamard", 0, llama, sizes)
    assert fold.edits(claim, llama, other, sizes, (64,)) == ()


def test_gain_meets_the_weight_on_its_device():
    weight = torch.empty(4, 8, device="meta")
    scaled = ScaleColumns(("gain",), 1.0).apply(weight, lambda name: torch.zeros(8))
    assert scaled.device == weight.device


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_quantised_is_the_fp32_fold(layout, source, tmp_path):
    """Nothing is rounded to bf16 between folding and quantising."""
    model = source("llama biased", torch.bfloat16)
    exact = fold_to(model, tmp_path / "exact", "--rotate", "r1r2", "--dtype", "float32")
    out = fold_to(
        model, tmp_path / "out", "--rotate", "r1r2", "--scheme", "w4a16", "--layout", layout
    )
    folded, weights = load_file(exact / "model.safetensors"), open_weights(open_checkpoint(out))
    rounded_differs = 0
    for parts in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("down_proj",))):
        modules = [f"model.layers.1.{parts[0]}.{name}" for name in parts[1]]
        group = [folded[f"{module}.weight"] for module in modules]
        scale = nvfp4.GlobalScale.from_amax(max(map(nvfp4.amax, group)))
        for module, weight in zip(modules, group, strict=True):
            stored = weights.stored(module).weight
            expected = nvfp4.quantize(weight, scale)
            assert torch.equal(stored.packed, expected.packed)
            assert torch.equal(
                stored.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8)
            )
            assert stored.global_scale == scale
            rounded = nvfp4.quantize(weight.to(torch.bfloat16), scale)
            rounded_differs += int((rounded.packed != expected.packed).sum())
    assert rounded_differs > 0
