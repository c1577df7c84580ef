"""Specs of decoders: every tensor is claimed once, and what a fold changes leaves the logits alone.

Twins come from the configuration classes of transformers, with the flags on that add tensors, and
are folded through the files in fp64.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import spec_twins
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from spec_twins import EXACT, WRONG, Source, claims_of, shapes_of
from torch import Tensor
from transformers import AutoConfig

from nvfp4cli.check.compare import distance, fold, logits
from nvfp4cli.check.twin import load
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models.claims import Claim, recognize
from nvfp4cli.models.document import SPECS, read
from nvfp4cli.models.pieces import pieces
from nvfp4cli.models.spec import load as load_spec

OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17)

# What each twin has beyond the defaults of its configuration.
FLAGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0], "attention_bias": True},
    "mixtral": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6, "attention_bias": True,
                    "mlp_bias": True},
    "deepseek_v3": {"attention_bias": True},
    "gemma": {"attention_bias": True},
    "gemma2": {"attention_bias": True},
    "gemma3_text": {"attention_bias": True},
    "phi3": {"tie_word_embeddings": True},
    "olmo2": {"attention_bias": True},
    "olmo3": {"attention_bias": True},
    "exaone4": {"tie_word_embeddings": True},
    "gpt_oss": {},
    "granitemoe": {"attention_bias": True, "embedding_multiplier": 12.0, "logits_scaling": 6.0,
                   "residual_multiplier": 0.22, "tie_word_embeddings": True},
    "llama4_text": {"attention_bias": True, "interleave_moe_layer_step": 2},
    "minimax_m2": {},
    "hunyuan_v1_dense": {"head_dim": 128, "attention_bias": True},
    "ernie4_5": {"use_bias": True},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "apertus": {"attention_bias": True},
}  # fmt: skip
POST_NORMS = {
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v3",
           "granitemoe", "minimax_m2")  # fmt: skip
LAYER = "model.layers.{layer}."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Source]:
    """`source(model_type, **more flags)`, the same for the same arguments."""
    made: dict[str, Source] = {}

    def make(model_type: str, **flags: Any) -> Source:
        key = json.dumps([model_type, flags])
        if OLD and model_type in ("exaone4", "apertus"):
            pytest.skip("transformers 5.0 makes no such model from its own defaults")
        if key not in made:
            folder = tmp_path_factory.mktemp(model_type) / "twin"
            made[key] = spec_twins.source(model_type, FLAGS[model_type] | flags, folder)
        return made[key]

    return make


def check_claims(folder: Path, config: dict[str, Any]) -> None:
    """Every tensor has one owner, in whose spec its shape stands."""
    for name, one in claims_of(shapes_of(folder), config).items():
        assert one is None or one.part == "bias" or one.spec.shape is not None, name


def write_spec(document: dict[str, Any], folder: Path) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("model_type", FLAGS)
def test_every_tensor_is_claimed_once_and_has_its_shape(model_type, source):
    twin = source(model_type)
    check_claims(twin.folder, twin.made.config)


@pytest.mark.parametrize("model_type", FLAGS)
def test_folds_keep_the_logits(model_type, source, tmp_path):
    twin, rotate = source(model_type), "r1r2"
    if model_type in POST_NORMS:
        with pytest.raises(UnsupportedError) as refusal:
            fold(twin.folder, tmp_path / "out", "r1")
        gains = (f"model.layers.0.{norm}.weight" for norm in POST_NORMS[model_type])
        assert any(gain in str(refusal.value) for gain in gains)
        rotate = "r2"
    assert twin.error(tmp_path / "out", rotate) <= EXACT


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("deepseek_v2", {"q_lora_rank": None, "mlp_bias": False}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}),
        ("granitemoe", {"attention_bias": False, "tie_word_embeddings": False}),
        ("gpt_oss", {"attention_bias": False}),
        ("ernie4_5", {"use_bias": False, "tie_word_embeddings": False}),
    ],
)
def test_folds_keep_the_logits_without_optional_tensors(model_type, flags, source, tmp_path):
    twin = source(model_type, **flags)
    check_claims(twin.folder, twin.made.config)
    assert shapes_of(twin.folder).keys() != shapes_of(source(model_type).folder).keys()
    assert twin.error(tmp_path / "out", "r1r2") <= EXACT


@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_that_transformers_stores_together(model_type, source, tmp_path):
    twin, together = source(model_type), tmp_path / "together"
    twin.made.model.save_pretrained(together, save_original_format=False)
    (together / "config.json").write_text(json.dumps(twin.made.config), encoding="utf-8")
    if OLD and model_type == "granitemoe":
        pytest.skip("transformers 5.0 stores these experts as the hub does")
    assert any(name.endswith(".experts.gate_up_proj") for name in shapes_of(together))
    check_claims(together, twin.made.config)
    fold(together, tmp_path / "out", "r1r2")
    assert distance(twin.before, logits(load(tmp_path / "out"), twin.given)) <= EXACT


@pytest.mark.skipif(OLD, reason="some defaults were others")
@pytest.mark.parametrize("model_type", FLAGS)
def test_defaults_are_those_of_transformers(model_type):
    spec, config = load_spec(model_type), AutoConfig.for_model(model_type)
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    sizes = spec.sizes({name: getattr(config, name) for name in needed})
    theirs = {name: getattr(config, name, None) for name in spec.defaults}
    theirs = {name: size for name, size in theirs.items() if size is not None}
    assert {name: sizes[name] for name in theirs} == theirs
    assert spec.tied_by_default == config.tie_word_embeddings


# --- one fact of a spec changed, by which the same fold becomes wrong ---

Document = dict[str, Any]


def inner(*names: str) -> Callable[[Document], None]:
    """Modules of a layer that no rotation touches."""

    def edit(document: Document) -> None:
        kept = ("suffixes", "axes", "shape", "variant", "written_as", "interleaved", "bias")
        for name in names:
            module = document["modules"][LAYER + name]
            found = {key: module[key] for key in kept if key in module}
            document["modules"][LAYER + name] = {"role": "inner", **found}

    return edit


def still(name: str, suffix: str = ".bias") -> Callable[[Document], None]:
    """The bias of a layer's module stays as it is while the weight turns."""

    def edit(document: Document) -> None:
        module = document["modules"][LAYER + name]
        module["suffixes"] = module.get("suffixes", {}) | {"bias": None}
        variant = {"variant": module["variant"]} if "variant" in module else {}
        alone = {"role": "inner", "suffixes": {"weight": ""}, **variant}
        document["modules"][LAYER + name + suffix] = alone

    return edit


def first_rows(document: Document) -> None:
    """Values are taken to be where the queries, or the keys of the first head, are."""
    for module in document["modules"].values():
        module.get("value_rows", {})["start"] = "0"


CONTROLS = [
    ("qwen2_moe", "r1", inner("mlp.gate")),
    ("qwen2_moe", "r1", inner("mlp.shared_expert_gate")),
    ("qwen2_moe", "r1", inner("mlp.shared_expert.up_proj")),
    ("qwen3_moe", "r1", inner("mlp.experts.{expert}.gate_proj")),
    ("qwen3_moe", "r1", still("self_attn.o_proj")),
    ("mixtral", "r1", inner("block_sparse_moe.gate", "mlp.gate")),
    ("minimax_m2", "r1", inner("block_sparse_moe.experts.{expert}.w2")),
    ("glm", "r1", inner("mlp.gate_up_proj")),
    ("glm", "r2", still("self_attn.v_proj")),
    ("glm4_moe", "r1", inner("mlp.shared_experts.down_proj")),
    ("deepseek_v2", "r1", still("mlp.shared_experts.down_proj")),
    ("deepseek_v2", "r2", first_rows),
    ("deepseek_v3", "r1", inner("self_attn.kv_a_proj_with_mqa")),
    ("gemma", "r1", lambda document: document.update(norm_gain="plain")),
    ("phi3", "r2", first_rows),
    ("gpt_oss", "r1", inner("mlp.router")),
    ("gpt_oss", "r1", still("mlp.experts.down_proj", "_bias")),
    ("granitemoe", "r1", inner("block_sparse_moe.router.layer", "block_sparse_moe.router")),
    ("llama4_text", "r1", inner("feed_forward.router")),
    ("seed_oss", "r2", still("self_attn.v_proj")),
    ("ernie4_5", "r1", still("mlp.down_proj")),
    ("apertus", "r1", inner("mlp.up_proj")),
    *((model_type, "r1", inner(*norms)) for model_type, norms in POST_NORMS.items()),
]


@pytest.mark.parametrize(("model_type", "rotate", "edit"), CONTROLS)
def test_a_wrong_fact_in_a_spec_changes_the_logits(model_type, rotate, edit, source, tmp_path):
    document = read(SPECS / f"{model_type}.yaml")
    edit(document)
    spec = write_spec(document, tmp_path)
    assert source(model_type).error(tmp_path / "out", rotate, spec) >= WRONG


# --- layers that predict further tokens ---

MTP = {"enorm": (48,), "hnorm": (48,), "eh_proj": (48, 96), "embed_tokens": (128, 48),
       "shared_head.norm": (48,), "shared_head.head": (128, 48)}  # fmt: skip


def write_with_mtp(twin: Source, folder: Path) -> int:
    """The twin with one layer more, as checkpoints on the hub have it. Returns its number."""
    tensors = load_file(twin.folder / "model.safetensors")
    layer = twin.made.config["num_hidden_layers"]
    last, own = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[name.replace(last, own)] = tensors[name].clone()
    generator = torch.Generator().manual_seed(0)
    for name, shape in MTP.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[f"{own}{name}.weight"] = 1 + 0.3 * noise if len(shape) == 1 else noise
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(twin.made.config), encoding="utf-8")
    return layer


def draft(tensors: dict[str, Tensor], layer: int, stream: Tensor, normed: bool) -> Tensor:
    """Logits of a layer that predicts further tokens, without what its decoder layer adds.

    stream: [T, H] of the main model before its last norm, which is applied if `normed`.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt() * tensors[name]

    own = f"model.layers.{layer}."
    previous = norm(stream, "model.norm.weight") if normed else stream
    tokens = tensors[own + "embed_tokens.weight"][: len(stream)]
    both = [norm(tokens, own + "enorm.weight"), norm(previous, own + "hnorm.weight")]
    joined = torch.cat(both, dim=-1) @ tensors[own + "eh_proj.weight"].T
    return (
        norm(joined, own + "shared_head.norm.weight") @ tensors[own + "shared_head.head.weight"].T
    )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_further_layers_refuse_r1_since_engines_norm_the_stream_first(model_type, source, tmp_path):
    twin = source(model_type)
    layer = write_with_mtp(twin, tmp_path / "mtp")
    check_claims(tmp_path / "mtp", twin.made.config)
    fold(tmp_path / "mtp", tmp_path / "r2", "r2")
    with pytest.raises(UnsupportedError, match="hnorm reads the output of"):
        fold(tmp_path / "mtp", tmp_path / "r1", "r1")

    document = read(SPECS / f"{model_type}.yaml")
    del document["refuse"]
    fold(tmp_path / "mtp", tmp_path / "r1", "r1", write_spec(document, tmp_path))
    before = load_file(tmp_path / "mtp" / "model.safetensors")
    after = load_file(tmp_path / "r1" / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    r1 = torch.linalg.lstsq(before[embedding], after[embedding]).solution  # E' = E R1
    stream = torch.randn(8, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def error(normed: bool) -> float:
        given = draft(before, layer, stream, normed)
        return distance(given, draft(after, layer, stream @ r1, normed))

    assert error(False) <= EXACT < WRONG <= error(True)


# --- what engines merge, what they leave in high precision, and experts in one tensor ---


def claims(model_type: str, *names: str) -> list[Claim]:
    """Of tensors of layer 3."""
    found, unclaimed = recognize(load_spec(model_type), [f"model.layers.3.{n}" for n in names])
    assert not unclaimed
    return [one for one in found.values() if one is not None]


@pytest.mark.parametrize(
    ("model_type", "parent", "names", "merged"),
    [
        ("qwen3_moe", "self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        ("qwen3_moe", "mlp.experts.7", ("gate_proj", "up_proj"), "gate_up_proj"),
        ("qwen2_moe", "mlp.shared_expert", ("gate_proj", "up_proj"), "gate_up_proj"),
        ("mixtral", "block_sparse_moe.experts.7", ("w1", "w3"), "w13"),
        ("deepseek_v3", "self_attn", ("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
        ("llama4_text", "feed_forward", ("gate_proj", "up_proj"), "gate_up_proj"),
        ("apertus", "self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    ],
)
def test_what_engines_merge_is_one_group(model_type, parent, names, merged):
    found = claims(model_type, *(f"{parent}.{name}.weight" for name in names))
    assert [one.fused_module for one in found] == [f"model.layers.3.{parent}.{merged}"] * len(names)


@pytest.mark.parametrize(
    ("model_type", "name", "because"),
    [
        ("qwen2_moe", "mlp.gate", "router"),
        ("qwen2_moe", "mlp.shared_expert_gate", "gate of the shared expert"),
        ("mixtral", "block_sparse_moe.gate", "router"),
        ("gpt_oss", "mlp.router", "router"),
        ("granitemoe", "block_sparse_moe.router.layer", "router"),
        ("llama4_text", "feed_forward.router", "router"),
        ("deepseek_v2", "self_attn.kv_b_proj", "engines absorb it into the attention"),
        ("glm4_moe", "eh_proj", "engines do not quantise it"),
        ("deepseek_v3", "self_attn.q_b_proj", ""),
    ],
)
def test_presets_leave_linear_modules_in_high_precision(model_type, name, because):
    (one,) = claims(model_type, f"{name}.weight")
    assert one.spec.quantizable
    assert (one.spec.quantize, one.spec.because) == (not because, because)


@pytest.mark.parametrize(
    ("model_type", "name", "gates", "ups"),
    [
        ("gpt_oss", "mlp.experts.gate_up_proj", slice(0, None, 2), slice(1, None, 2)),
        ("llama4_text", "feed_forward.experts.gate_up_proj", slice(3), slice(3, None)),
        ("qwen3_moe", "mlp.experts.gate_up_proj", slice(3), slice(3, None)),
        ("granitemoe", "block_sparse_moe.input_linear.weight", slice(3), slice(3, None)),
    ],
)
def test_gates_and_ups_in_a_tensor_of_all_experts(model_type, name, gates, ups):
    (one,) = claims(model_type, name)
    upright = torch.arange(48).view(2, 6, 4)  # [expert, out, in]
    tensor = upright.mT if one.spec.axes == "expert in out" else upright
    found = {piece.module: piece.of(tensor[piece.expert]) for piece in pieces(one, tensor.shape)}
    parent = f"model.layers.3.{name.partition('.')[0]}.experts"
    assert found.keys() == {f"{parent}.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up")}
    for expert in (0, 1):
        assert torch.equal(found[f"{parent}.{expert}.gate_proj"], upright[expert, gates])
        assert torch.equal(found[f"{parent}.{expert}.up_proj"], upright[expert, ups])
