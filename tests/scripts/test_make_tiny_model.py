import json

import make_tiny_model as tiny
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from nvfp4cli.cli.app import main


@pytest.mark.parametrize("model_type", tiny.SHAPED)
def test_loads_back_and_no_parameter_kept_its_initial_value(tiny_model, model_type):
    folder = tiny_model(model_type)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.config.model_type == model_type
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.float().std() > 0.05, name
    row_means = model.model.embed_tokens.weight.float().mean(dim=1)
    assert row_means.std() > 0.3
    with torch.no_grad():
        logits = model(input_ids=torch.arange(4, 36)[None]).logits.float()
    assert logits.shape == (1, 32, 512)
    assert logits.isfinite().all()
    assert logits.std() > 0.01


@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
def test_every_model_type_runs_and_can_be_quantised(model_type, tmp_path, capsys, monkeypatch):
    model = tiny.make_model(tiny.make_config(model_type))
    assert model.config.model_type == model_type
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.numel() == 1 or parameter.float().std() > 0.02, name
    # The wrapper of Llama 4 asks its language model's output for an entry that this lacks.
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(4, 20)[None]).logits.float()
    assert logits.shape == (1, 16, 512)
    assert logits.isfinite().all()
    assert logits.std() > 0.01
    source, out = tmp_path / "source", tmp_path / "out"
    tiny.save(model, source)
    assert main(["quantize", str(source), str(out), "--layout", "compressed-tensors"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(out), "--strict", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["violations"] == []


def test_tokens_of_pictures_are_none_of_the_tokenizers(tmp_path):
    model = tiny.make_model(tiny.make_config("qwen3_vl"))
    tiny.save(model, tmp_path)
    config = model.config
    marks = {config.image_token_id, config.video_token_id, config.vision_start_token_id}
    assert len(AutoTokenizer.from_pretrained(tmp_path)) <= min(marks)
    assert max(marks) < config.text_config.vocab_size


def test_kinds_of_layers_that_the_defaults_leave_out():
    layers = tiny.make_model(tiny.make_config("qwen3_moe")).model.layers
    assert {hasattr(layer.mlp, "experts") for layer in layers} == {True, False}
    assert set(tiny.make_config("lfm2").layer_types) == {"conv", "full_attention"}


def test_sizes_are_refused_where_a_model_type_has_its_own(monkeypatch, capsys):
    with pytest.raises(ValueError, match="mixtral has sizes of its own"):
        tiny.make_config("mixtral", tiny.Shape())
    monkeypatch.setattr("sys.argv", ["make_tiny_model.py", "mixtral", "out", "--layers", "3"])
    with pytest.raises(SystemExit) as ended:
        tiny.main()
    assert ended.value.code == 2
    assert "only llama, mistral, qwen2, qwen3, smollm3, granite take others" in (
        capsys.readouterr().err
    )


def test_same_seed_same_bytes_and_other_seed_other_values():
    config = tiny.make_config("llama", tiny.Shape())
    first, again, other = (tiny.make_model(config, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_switches_reach_the_model():
    shape = tiny.Shape(tie=True, attention_bias=True, mlp_bias=True, head_dim=32)
    model = tiny.make_model(tiny.make_config("llama", shape))
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert attention.o_proj.bias is not None
    assert mlp.down_proj.bias is not None
    assert attention.q_proj.weight.shape == (4 * 32, 64)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_switch_the_architecture_lacks_is_refused():
    with pytest.raises(ValueError, match="qwen2 has no mlp_bias"):
        tiny.make_config("qwen2", tiny.Shape(mlp_bias=True))


@pytest.mark.parametrize("shards", [2, 3, 21])
def test_exactly_the_shards_asked_for_hold_each_tensor_once(tiny_model, shards):
    folder = tiny_model("llama", shards=shards)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == shards
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    parts = {f.name: load_file(f) for f in files}
    assert {n: f for f, part in parts.items() for n in part} == index["weight_map"]
    whole = load_file(tiny_model("llama") / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    for name, tensor in whole.items():
        assert torch.equal(parts[index["weight_map"][name]][name], tensor)


def test_tokenizer_is_lossless_and_within_the_vocabulary(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    text = 'The harbour, 1013.2 hPa: "no" - naïve 漢字 🦞\n\n\tend'
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 512
    assert len(tokenizer("The harbour lay still").input_ids) < len("The harbour lay still") / 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_command_line(tmp_path, monkeypatch, capsys):
    arguments = ["qwen3", str(tmp_path / "m"), "--hidden", "32", "--tie", "--dtype", "fp32"]
    monkeypatch.setattr("sys.argv", ["make_tiny_model.py", *arguments])
    tiny.main()
    assert capsys.readouterr().out == f"{tmp_path / 'm'}\n"
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["hidden_size"], config["tie_word_embeddings"]) == (32, True)
    assert load_file(tmp_path / "m" / "model.safetensors")["model.norm.weight"].dtype == (
        torch.float32
    )
