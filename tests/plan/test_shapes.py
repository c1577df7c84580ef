"""config.json held against the shapes: what engines refuse or read wrongly is said by the plan."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
FILE = "model.safetensors"
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def plan_for(model: Path, **recipe: object) -> Plan:
    return plan_quantize(
        open_checkpoint(model), Recipe(**recipe), model="m", arch_spec=None, strict=False
    )


@pytest.fixture
def altered(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A tiny model with other entries in config.json (None: without it) and other tensors."""

    def make(
        source: str, *, tensors: dict[str, Tensor | None] | None = None, **config: object
    ) -> Path:
        folder = tmp_path / "altered"
        shutil.copytree(tiny_model(source, vocab=264), folder)
        document = json.loads((folder / "config.json").read_text()) | config
        kept = {key: value for key, value in document.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        found = load_file(folder / FILE) | (tensors or {})
        found = {name: t for name, t in found.items() if t is not None}
        save_file(found, folder / FILE, metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_models_as_transformers_saves_them_fit(model_type, tie, tiny_model):
    odd = {"heads": 6, "kv_heads": 3, "hidden": 96, "intermediate": 80, "layers": 1}
    plan = plan_for(tiny_model(model_type, vocab=300, tie=tie, **odd))
    assert sum(member.action == "quantize" for member in plan.members) == 7


@pytest.mark.parametrize("head_dim", [8, 48])
def test_heads_need_not_fill_the_hidden_size(head_dim, tiny_model):
    assert plan_for(tiny_model("llama", vocab=264, head_dim=head_dim), rotate="r1").members


CONTRADICTIONS = {
    "heads": (
        {"num_attention_heads": 3, "num_key_value_heads": 1},
        r"num_attention_heads \* head_dim is 3 \* 16 = 48 in config\.json, and "
        rf"{ATTENTION}\.q_proj\.weight has shape \[64, 64\]: correct config\.json",
    ),
    "no KV heads": ({"num_key_value_heads": 0}, r"num_key_value_heads is 0 in config\.json: write"),
    "negative": ({"num_key_value_heads": -2}, r"num_key_value_heads is -2 in config\.json"),
    "KV heads that do not divide": (
        {"num_key_value_heads": 3},
        r"num_attention_heads is 4 .* no multiple of num_key_value_heads, 3: correct config\.json",
    ),
    "more KV heads": (
        {"num_key_value_heads": 4},
        rf"num_key_value_heads \* head_dim is 4 \* 16 = 64 .*{ATTENTION}\.k_proj.* \[32, 64\]",
    ),
    "all heads by default": (
        {"num_key_value_heads": None},
        rf"num_key_value_heads \* head_dim is 4 \* 16 = 64 .*{ATTENTION}\.k_proj",
    ),
    "head_dim": (
        {"head_dim": 32},
        rf"heads \* head_dim is 4 \* 32 = 128 .*{ATTENTION}\.q_proj.*\[64, 64\]",
    ),
    "head_dim by default": (
        {"head_dim": None, "num_attention_heads": 8},
        rf"is 2 \* 8 = 16 .*{ATTENTION}\.k_proj",
    ),
    "intermediate_size": (
        {"intermediate_size": 64},
        rf"intermediate_size is 64 .*{MLP}\.gate_proj.*\[128, 64\]",
    ),
    "vocab_size": ({"vocab_size": 265}, r"vocab_size is 265 .*embed_tokens\.weight.*\[264, 64\]"),
    "hidden_size": ({"hidden_size": 128}, r"hidden_size is 128 .*embed_tokens.*\[264, 64\]"),
    "layers": (
        {"num_hidden_layers": 3},
        r"lacks model\.layers\.2\.\S+, .* and 6 more, and num_hidden_layers is 3 in config\.json",
    ),
    "head_dim of nothing": (
        {"head_dim": None, "num_attention_heads": 128, "num_key_value_heads": 2},
        r"head_dim is 0 by default: write",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_named_with_both_figures(case, altered):
    config, sentence = CONTRADICTIONS[case]
    with pytest.raises((CheckpointError, UnsupportedError), match=sentence) as caught:
        plan_for(altered("llama", **config))
    assert str(caught.value).endswith(".")


SHAPES = {
    "no rows": (f"{MLP}.up_proj.weight", (0, 64), r"shape \[0, 64\] and so no values: restore"),
    "one axis": (f"{MLP}.up_proj.weight", (8192,), r"shape \[8192\] instead of 2 axes: restore"),
    "transposed": (f"{MLP}.down_proj.weight", (128, 64), r"hidden_size is 64 .*\[128, 64\]"),
    "norm": ("model.norm.weight", (63,), r"hidden_size is 64 .*model\.norm\.weight.* \[63\]"),
    "short head": ("lm_head.weight", (263, 64), r"vocab_size is 264 .*lm_head.* \[263, 64\]"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_tensors_of_another_shape(case, altered):
    name, shape, sentence = SHAPES[case]
    with pytest.raises(CheckpointError, match=sentence):
        plan_for(altered("llama", tensors={name: torch.ones(shape)}))


def test_a_padded_embedding_is_accepted(altered):
    padded = torch.ones(320, 64)
    tensors = {"model.embed_tokens.weight": padded, "lm_head.weight": padded.clone()}
    assert plan_for(altered("llama", tensors=tensors)).members[0].shape == (320, 64)


def test_biases_have_the_rows_of_their_weights(altered):
    bias = f"{ATTENTION}.k_proj.bias"
    with pytest.raises(CheckpointError, match=rf"= 32 .*{bias} has shape \[64\]"):
        plan_for(altered("qwen2", tensors={bias: torch.ones(64)}))


@pytest.mark.parametrize("name", ["q_norm.weight", "k_norm.weight"])
def test_norms_of_heads(name, altered):
    with pytest.raises(UnsupportedError, match=f"lacks {ATTENTION}.{name}, and num_hidden_layers"):
        plan_for(altered("qwen3", tensors={f"{ATTENTION}.{name}": None}))


def test_norms_of_heads_have_the_size_of_a_head(altered):
    name = f"{ATTENTION}.q_norm.weight"
    with pytest.raises(CheckpointError, match=rf"head_dim is 16 .*{name} has shape \[64\]"):
        plan_for(altered("qwen3", tensors={name: torch.ones(64)}))


def test_a_bias_that_the_architecture_has(altered):
    bias = f"{ATTENTION}.k_proj.bias"
    with pytest.raises(UnsupportedError, match=f"lacks {bias}, and a qwen2 model has a bias"):
        plan_for(altered("qwen2", tensors={bias: None}))


def test_a_bias_that_config_json_denies(altered):
    bias = f"{ATTENTION}.k_proj.bias"
    with pytest.raises(UnsupportedError, match=f"holds {bias}, and attention_bias is false"):
        plan_for(altered("llama", tensors={bias: torch.ones(32)}))


def test_a_spec_without_shapes_still_checks_the_residual_stream(altered, tmp_path):
    """As files were written before shapes could be."""
    path = tmp_path / "old.yaml"
    path.write_text(
        "model_type: nova\nmodules:\n  model.embed_tokens: {role: embed}\n"
        "  model.norm: {role: norm}\n"
        "  lm_head: {role: reader, norm: model.norm, tied_to: model.embed_tokens}\n"
        "keep:\n  - model.layers.{layer}.self_attn.x.weight\n"
    )
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    model = altered("llama", model_type="nova", num_key_value_heads=3, vocab_size=None)
    tensors = load_file(model / FILE)
    kept = {name: tensors[name] for name in names}
    for wrong, shape in {"": (), "model.norm.weight": (32,), "lm_head.weight": (264, 32)}.items():
        changed = kept | ({wrong: torch.ones(shape)} if wrong else {})
        save_file(changed, model / FILE, metadata={"format": "pt"})
        checkpoint = open_checkpoint(model)
        options = {"model": "m", "arch_spec": path, "strict": False}
        if wrong:
            with pytest.raises(CheckpointError, match=f"hidden_size is 64 .*{wrong}"):
                plan_quantize(checkpoint, Recipe(), **options)
        else:
            assert len(plan_quantize(checkpoint, Recipe(), **options).members) == 3


def test_no_model_type(altered):
    with pytest.raises(CheckpointError, match=r"config\.json has no model_type: add it, or name"):
        plan_for(altered("llama", model_type=None))


@pytest.mark.parametrize(
    ("model_type", "config", "kind"),
    [
        ("aya_vision", {"text_config": {}, "vision_config": {}}, "vision-language"),
        ("got_ocr2", {"vision_config": {"depth": 2}}, "vision-language"),
        ("qwen2_audio", {"text_config": {}, "audio_config": {}}, "multimodal"),
    ],
)
def test_wrappers_are_named(model_type, config, kind, altered):
    model = altered("llama", model_type=model_type, hidden_size=None, **config)
    with pytest.raises(UnsupportedError, match=f"{model_type} is a {kind} wrapper, which .*: save"):
        plan_for(model)


def test_the_dtype_is_that_of_all_parameters_but_not_of_kept_tensors(altered):
    """transformers computes in one dtype; `keep` in a spec means the source's bytes."""
    buffer = f"{ATTENTION}.rotary_emb.inv_freq"
    model = altered("qwen3", tensors={buffer: torch.ones(8)})
    outputs = {m.name: m.outputs[0] for m in plan_for(model, dtype="float16").members}
    assert outputs.pop(buffer).dtype == torch.float32
    assert outputs[f"{ATTENTION}.q_norm.weight"].dtype == torch.float16
    dtypes = {o.dtype for name, o in outputs.items() if name == o.name and "_proj" not in name}
    assert dtypes == {torch.float16}
