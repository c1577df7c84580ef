"""Specs of hybrids, of LayerNorm models and of GPT-2: tensors claimed once, folds that are exact.

Twins come from the configuration classes of transformers, with the flags on that add tensors, and
are folded through the files in fp64.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from spec_twins import (
    EXACT,
    WRONG,
    Document,
    Source,
    changed,
    claims_of,
    inner,
    shapes_of,
    source,
    still,
    wrong,
)
from transformers import AutoConfig

from nvfp4cli.check.compare import fold
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.models.claims import Claim, recognize
from nvfp4cli.models.spec import load

# What each twin has beyond the defaults of its configuration.
FLAGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [0], "attention_bias": True},
    "qwen3_5_text": {"tie_word_embeddings": True},
    "qwen3_5_moe_text": {},
    "cohere": {"use_qk_norm": True, "attention_bias": True},
    "cohere2": {"head_dim": 128},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "opt": {},
    "gpt2": {},
    "phi": {"qk_layernorm": True},
    "starcoder2": {},
    "nemotron": {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16, "conv_bias": True},
    "falcon_h1": {
        "attention_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "mamba_rms_norm": True,
        "embedding_multiplier": 5.0,
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.25,
        "tie_word_embeddings": True,
    },
}
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LAYER = "model.layers.{layer}."


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Source]:
    """`made(model_type, **more flags)`, the same for the same arguments."""
    sources: dict[str, Source] = {}

    def make(model_type: str, **flags: Any) -> Source:
        key = json.dumps([model_type, flags])
        if key not in sources:
            folder = tmp_path_factory.mktemp(model_type) / "twin"
            sources[key] = source(model_type, FLAGS[model_type] | flags, folder)
        return sources[key]

    return make


@pytest.mark.parametrize("model_type", FLAGS)
def test_folds_keep_the_logits(model_type, made, tmp_path):
    twin = made(model_type)
    claims_of(shapes_of(twin.folder), twin.made.config)
    rotate = "r1" if model_type in GATED else "r1r2"
    assert twin.error(tmp_path / "out", rotate) <= EXACT


@pytest.mark.parametrize(
    ("model_type", "flags"),
    [
        ("qwen3_next", {"mlp_only_layers": [], "attention_bias": False}),
        ("cohere", {"use_qk_norm": False, "attention_bias": False}),
        ("stablelm", {"use_qkv_bias": False, "qk_layernorm": False}),
        ("opt", {"enable_bias": False}),
        ("phi", {"qk_layernorm": False}),
        ("starcoder2", {"use_bias": False}),
        ("lfm2", {"conv_bias": False}),
        ("falcon_h1", {"mamba_rms_norm": False, "mamba_proj_bias": False, "mlp_bias": False}),
    ],
)
def test_folds_keep_the_logits_without_optional_tensors(model_type, flags, made, tmp_path):
    twin = made(model_type, **flags)
    shapes = shapes_of(twin.folder)
    claims_of(shapes, twin.made.config)
    assert shapes.keys() != shapes_of(made(model_type).folder).keys()
    rotate = "r1" if model_type in GATED else "r1r2"
    assert twin.error(tmp_path / "out", rotate) <= EXACT


def values_that_turn(document: Document) -> None:
    """R2 on the full attention of a model that gates it."""
    document["modules"][f"{LAYER}self_attn.v_proj"]["heads"] = "kv_rows"
    document["modules"][f"{LAYER}self_attn.o_proj"]["heads"] = "query_columns"
    del document["refuse"]


@pytest.mark.parametrize("model_type", GATED)
def test_a_gate_for_every_channel_refuses_r2(model_type, made, tmp_path):
    twin = made(model_type)
    with pytest.raises(UnsupportedError, match=r"does not hold for .*self_attn\.q_proj is a gate"):
        fold(twin.folder, tmp_path / "out", "r2")
    spec = wrong(model_type, values_that_turn, tmp_path / "wrong.yaml")
    assert twin.error(tmp_path / "out", "r2", spec) >= WRONG


CONTROLS = [
    ("qwen3_next", "r1", inner(f"{LAYER}linear_attn.in_proj_ba")),
    ("qwen3_next", "r1", inner(f"{LAYER}linear_attn.out_proj")),
    ("qwen3_next", "r1", inner(f"{LAYER}mlp.shared_expert_gate")),
    ("qwen3_next", "r1", changed("norm_gain", "plain")),
    ("qwen3_5_text", "r1", inner(f"{LAYER}linear_attn.in_proj_z")),
    ("qwen3_5_moe_text", "r1", inner(f"{LAYER}mlp.gate")),
    ("qwen3_5_moe_text", "r1", inner(f"{LAYER}mlp.experts.{{expert}}.down_proj")),
    ("cohere", "r1", changed("norm_kind", "rms")),
    ("cohere", "r1", still(f"{LAYER}self_attn.o_proj")),
    ("cohere2", "r1", changed("norm_kind", "rms")),
    ("stablelm", "r1", still(f"{LAYER}post_attention_layernorm")),
    ("stablelm", "r2", still(f"{LAYER}self_attn.v_proj")),
    ("opt", "r1", inner("model.decoder.embed_positions")),
    ("opt", "r1", still("model.decoder.layers.{layer}.fc2")),
    ("gpt2", "r1", inner("transformer.wpe")),
    ("gpt2", "r1", still("transformer.h.{layer}.attn.c_proj")),
    ("gpt2", "r2", changed("value_rows", {"start": "hidden_size", "pitch": "head_dim"},
                           "transformer.h.{layer}.attn.c_attn")),
    ("phi", "r1", still("model.final_layernorm")),
    ("starcoder2", "r1", still(f"{LAYER}mlp.c_proj")),
    ("nemotron", "r1", changed("norm_gain", "plain")),
    ("lfm2", "r1", inner(f"{LAYER}conv.in_proj")),
    ("lfm2", "r1", still(f"{LAYER}conv.out_proj")),
    ("falcon_h1", "r1", inner(f"{LAYER}mamba.in_proj")),
    ("falcon_h1", "r1", still(f"{LAYER}mamba.out_proj")),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "rotate", "edit"), CONTROLS)
def test_a_wrong_fact_in_a_spec_changes_the_logits(model_type, rotate, edit, made, tmp_path):
    spec = wrong(model_type, edit, tmp_path / "wrong.yaml")
    assert made(model_type).error(tmp_path / "out", rotate, spec) >= WRONG


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_experts_in_one_tensor(model_type, made, tmp_path):
    twin = made(model_type)
    together = twin.renamed(tmp_path / "together")
    shapes = shapes_of(together)
    assert f"{LAYER}mlp.experts.gate_up_proj".format(layer=1) in shapes
    claims_of(shapes, twin.made.config)
    fold(together, tmp_path / "out", "r1")
    assert twin.error_of(tmp_path / "out") <= EXACT


@pytest.mark.parametrize("model_type", FLAGS)
def test_defaults_are_those_of_transformers(model_type):
    config = AutoConfig.for_model(model_type)
    spec = load(model_type)
    sizes = spec.sizes({})
    wanted = {name: getattr(config, name, None) for name in spec.defaults}
    if model_type == "gpt2":
        wanted["n_inner"] = 4 * config.n_embd  # null there
    stated = {name: size for name, size in wanted.items() if size is not None}
    assert {name: sizes[name] for name in stated} == stated
    assert spec.tied({}) is config.tie_word_embeddings


# --- layers that predict further tokens ---


def with_mtp(twin: Source, folder: Path) -> list[str]:
    """The twin and an MTP block, as checkpoints on the hub have it. Returns its names."""
    tensors = load_file(twin.folder / "model.safetensors")
    layer = next(n.split(".self_attn.")[0] for n in tensors if "self_attn.q_proj.weight" in n) + "."
    hidden = tensors["model.norm.weight"]
    block = {
        **{name.replace(layer, "mtp.layers.0."): tensor.clone()
           for name, tensor in tensors.items() if name.startswith(layer)},
        "mtp.fc.weight": torch.randn(len(hidden), 2 * len(hidden), dtype=torch.float64),
        **{f"mtp.{name}.weight": hidden.clone()
           for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    }  # fmt: skip
    folder.mkdir()
    save_file(tensors | block, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(twin.made.config), encoding="utf-8")
    return list(block)


@pytest.mark.parametrize("model_type", GATED)
def test_an_mtp_block_refuses_r1_because_it_shares_the_head(model_type, made, tmp_path):
    twin = made(model_type)
    names = with_mtp(twin, tmp_path / "mtp")
    found = claims_of(shapes_of(tmp_path / "mtp"), twin.made.config)
    for name in names:
        one = found[name]
        assert one is not None and one.mtp
        assert not (one.spec.quantizable and one.spec.quantize)
    with pytest.raises(UnsupportedError, match=r"mtp\.norm feeds the same lm_head"):
        fold(tmp_path / "mtp", tmp_path / "out", "r1")
    with pytest.raises(UnsupportedError, match="lacks model"):
        claims_of({name: [] for name in names}, twin.made.config)


@pytest.mark.parametrize("model_type", GATED)
def test_an_mtp_block_is_whole(model_type, made, tmp_path):
    twin = made(model_type)
    names = with_mtp(twin, tmp_path / "mtp")
    shapes = shapes_of(tmp_path / "mtp")
    for gone in names:
        rest = {name: shape for name, shape in shapes.items() if name != gone}
        with pytest.raises(UnsupportedError) as refused:
            claims_of(rest, twin.made.config)
        assert str(refused.value).startswith("The checkpoint lacks mtp.")
        if not gone.endswith("_proj.bias"):  # which config.json demands
            assert "and holds others that predict further tokens" in str(refused.value)
    two = twin.made.config | {"mtp_num_hidden_layers": 2}
    with pytest.raises(UnsupportedError, match=r"lacks mtp\.layers\.1\."):
        claims_of(shapes, two)
    claims_of(shapes_of(twin.folder), two)


# --- what engines merge, and what stays in high precision ---


def claims(model_type: str, *names: str) -> list[Claim]:
    found, unclaimed = recognize(load(model_type), names)
    assert not unclaimed
    return [one for one in found.values() if one is not None]


@pytest.mark.parametrize(
    ("model_type", "names", "merged"),
    [
        ("qwen3_next", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
         "self_attn.qkv_proj"),
        ("qwen3_next", ["mlp.experts.7.gate_proj", "mlp.experts.7.up_proj"],
         "mlp.experts.7.gate_up_proj"),
        ("qwen3_next", ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"],
         "mlp.shared_expert.gate_up_proj"),
        ("qwen3_5_text", ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
         "linear_attn.in_proj_qkvz"),
        ("qwen3_5_text", ["linear_attn.in_proj_b", "linear_attn.in_proj_a"],
         "linear_attn.in_proj_ba"),
        ("lfm2", ["feed_forward.w1", "feed_forward.w3"], "feed_forward.w13"),
        ("falcon_h1", ["feed_forward.gate_proj", "feed_forward.up_proj"],
         "feed_forward.gate_up_proj"),
    ],
)  # fmt: skip
def test_what_engines_merge_is_one_group(model_type, names, merged):
    found = claims(model_type, *(f"model.layers.3.{name}.weight" for name in names))
    assert [one.fused_module for one in found] == [f"model.layers.3.{merged}"] * len(names)


@pytest.mark.parametrize("model_type", FLAGS)
def test_heads_and_gates_stay_in_high_precision(model_type):
    for module in load(model_type).modules:
        if module.tied_to or module.because in ("router", "gate of the shared expert"):
            assert module.quantizable and not module.quantize


@pytest.mark.parametrize(
    ("model_type", "quantized"),
    [
        ("qwen3_next", ["self_attn.o_proj", "linear_attn.out_proj", "mlp.experts.0.up_proj",
                        "mlp.shared_expert.down_proj"]),
        ("qwen3_5_text", ["mlp.down_proj"]),
        ("qwen3_5_moe_text", ["mlp.experts.0.down_proj", "mlp.shared_expert.up_proj"]),
    ],
)  # fmt: skip
def test_of_attention_nvidias_checkpoints_quantise_little(model_type, quantized):
    for one in claims(model_type, *(f"model.layers.0.{name}.weight" for name in quantized)):
        assert one.spec.quantizable and one.spec.quantize
    for one in claims(model_type, *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")):
        assert one.spec.quantizable and not one.spec.quantize
