"""Checkpoints as models: the logits of transformers itself, and no tensor left to chance."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.formats import nvfp4
from nvfp4cli.layouts import LAYOUTS
from nvfp4cli.layouts.record import Stored
from nvfp4cli.runtime.model import load, load_tokenizer

TOKENS = torch.arange(24).reshape(2, 12)


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=256,
    )
    return Qwen3MoeForCausalLM(config)


def multimodal() -> PreTrainedModel:
    if not hasattr(transformers, "Qwen3_5Config"):
        pytest.skip("this transformers has no Qwen3.5")
    torch.manual_seed(0)
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 64,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    return transformers.Qwen3_5ForConditionalGeneration(config)


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=TOKENS).logits


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a single-file checkpoint, or remove those given as None."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", [llama, lambda: llama(tied=True), moe, multimodal])
def test_an_unquantised_model_is_the_one_transformers_loads(tmp_path, source, dtype):
    source().to(torch.bfloat16).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    found = load(tmp_path, dtype=dtype, device="cpu")
    assert torch.equal(logits(found), logits(expected))
    assert found.dtype == dtype
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())


def test_tying_follows_the_config(tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "tied")
    tied = load(tmp_path / "tied", dtype=torch.float32, device="cpu")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    llama().save_pretrained(tmp_path / "untied")
    untied = load(tmp_path / "untied", dtype=torch.float32, device="cpu")
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


def test_an_untied_head_cannot_be_missing(tmp_path):
    llama().save_pretrained(tmp_path)
    edit(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight: compare"):
        load(tmp_path, dtype=torch.float32, device="cpu")


def test_faults_are_named_together(tmp_path):
    llama().save_pretrained(tmp_path)
    edit(
        tmp_path,
        **{
            "model.norm.weight": None,
            "model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64),
            **{f"model.layers.0.mlp.extra.{i}": torch.zeros(1) for i in range(5)},
        },
    )
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, dtype=torch.float32, device="cpu")
    sentence = str(caught.value)
    assert "lacks model.norm.weight and" in sentence
    assert "model.layers.0.mlp.extra.2 and 2 more" in sentence
    assert "model.layers.0.mlp.up_proj.weight ([96, 64] instead of [128, 64])" in sentence


@pytest.mark.parametrize("missing", [("gate",), ("gate", "up", "down")])
def test_a_missing_expert_is_an_error(tmp_path, missing):
    moe().save_pretrained(tmp_path)
    gone = {f"model.layers.0.mlp.experts.2.{part}_proj.weight": None for part in missing}
    edit(tmp_path, **gone)
    with pytest.raises(CheckpointError, match=r"fused weights|mlp\.experts"):
        load(tmp_path, dtype=torch.float32, device="cpu")


def test_a_file_cut_short_while_it_is_read_is_our_error(tmp_path, monkeypatch):
    moe().save_pretrained(tmp_path)

    def fail(self: object, name: str) -> Tensor:
        raise CheckpointError(f"{name} was truncated")

    monkeypatch.setattr("nvfp4cli.layouts.sources.Source.read", fail)
    with pytest.raises(CheckpointError, match="was truncated"):
        load(tmp_path, dtype=torch.float32, device="cpu")


def test_model_types_that_cannot_be_measured(tmp_path):
    llama().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama9"}))
    with pytest.raises(UnsupportedError, match="does not know the model type 'llama9'"):
        load(tmp_path, dtype=torch.float32, device="cpu")


def test_an_encoder_has_no_perplexity(tmp_path):
    config = BertConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "clip"}))
    with pytest.raises(UnsupportedError, match="not a causal language model"):
        load(tmp_path, dtype=torch.float32, device="cpu")


def quantize_layer(folder: Path, layout_name: str) -> dict[str, Tensor]:
    """Rewrite a Llama checkpoint's linear layers in a layout; returns the dequantised weights."""
    layout = LAYOUTS[layout_name]
    file = folder / "model.safetensors"
    written: dict[str, Tensor] = {}
    dequantised: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            written[name] = tensor
            continue
        scale = nvfp4.GlobalScale.from_amax(nvfp4.amax(tensor))
        record = nvfp4.quantize(tensor, scale)
        dequantised[name] = nvfp4.dequantize(record)
        written |= layout.export(name.removesuffix(".weight"), Stored(record))
    save_file(written, file)
    config = folder / "config.json"
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantization))
    return dequantised


@pytest.mark.parametrize("layout_name", sorted(LAYOUTS))
def test_every_layout_loads_as_its_dequantised_weights(tmp_path, layout_name):
    llama().save_pretrained(tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "quantised")
    dequantised = quantize_layer(tmp_path / "quantised", layout_name)
    edit(tmp_path / "source", **dequantised)
    assert len(dequantised) == 14
    expected = load(tmp_path / "source", dtype=torch.bfloat16, device="cpu")
    found = load(tmp_path / "quantised", dtype=torch.bfloat16, device="cpu")
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert torch.equal(logits(found), logits(expected))


def test_a_tokenizer_is_loaded_from_the_folder(tmp_path):
    llama().save_pretrained(tmp_path)
    vocabulary = {"<unk>": 0, "x": 1}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("x").input_ids == [1]


@pytest.mark.parametrize("leftover", [None, {"tokenizer_class": "LlamaTokenizer"}])
def test_no_tokenizer(tmp_path, leftover):
    llama().save_pretrained(tmp_path)
    if leftover is not None:  # transformers makes an empty tokenizer of it
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(leftover))
    with pytest.raises(CheckpointError, match=r"holds no tokenizer .* copy the tokenizer files"):
        load_tokenizer(tmp_path)
