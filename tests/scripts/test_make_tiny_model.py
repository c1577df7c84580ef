import json

import make_tiny_model as tiny
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize("model_type", tiny.MODEL_TYPES)
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
