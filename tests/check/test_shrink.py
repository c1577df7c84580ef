"""A twin's config.json: what is kept, and under which names."""

from typing import Any

import pytest

from nvfp4cli.check.shrink import HIDDEN, VOCAB, shrink, unstated
from nvfp4cli.errors import CheckpointError, UnsupportedError

DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "quantization_config": {"quant_method": "fp8"},
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}  # fmt: skip


def test_what_decides_the_architecture_is_kept() -> None:
    twin = shrink(DEEPSEEK)
    for key in ("q_lora_rank", "routed_scaling_factor", "scoring_func", "topk_method"):
        assert twin[key] == DEEPSEEK[key]
    assert (twin["hidden_size"], twin["vocab_size"]) == (HIDDEN, VOCAB)
    assert twin["num_key_value_heads"] == twin["num_attention_heads"]
    assert "head_dim" not in twin
    assert "quantization_config" not in twin
    assert (twin["num_hidden_layers"], twin["first_k_dense_replace"]) == (2, 1)
    assert twin["rope_scaling"]["factor"] == 40


def test_the_source_is_left_as_it_is() -> None:
    before = str(DEEPSEEK)
    shrink(DEEPSEEK)
    assert str(DEEPSEEK) == before


def test_sizes_keep_the_names_that_the_source_uses() -> None:
    twin = shrink({"model_type": "qwen3_moe", "num_experts": 128, "head_dim": 128})
    assert (twin["num_experts"], twin["head_dim"]) == (4, 16)
    assert "num_local_experts" not in twin  # transformers' own name of it
    twin = shrink({"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_inner": None})
    assert (twin["n_embd"], twin["n_head"], twin["n_inner"]) == (HIDDEN, 6, None)


def test_sizes_that_nothing_states() -> None:
    assert unstated({"model_type": "hunyuan_v1_dense"}) == ["head_dim"]
    assert unstated({"model_type": "hunyuan_v1_dense", "head_dim": 128}) == []
    stated = {"model_type": "deepseek_v2", "n_group": None, "topk_group": None}
    assert unstated(stated) == ["num_experts_per_tok"]
    assert unstated({"model_type": "qwen2_vl"}) == []


def test_heads_are_split_from_the_hidden_size_where_the_source_does_so() -> None:
    twin = shrink({"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32,
                   "num_key_value_heads": 8})  # fmt: skip
    assert "head_dim" not in twin
    assert (twin["num_attention_heads"], twin["num_key_value_heads"]) == (6, 2)


@pytest.mark.parametrize(("groups", "few"), [(32, 6), (8, 2), (1, 1)])
def test_grouping_of_heads(groups: int, few: int) -> None:
    twin = shrink({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": groups})
    assert (twin["num_attention_heads"], twin["num_key_value_heads"]) == (6, few)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 24},
            {"layer_types": ["sliding_attention", "full_attention"]},
        ),
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 48, "mlp_only_layers": [5]},
            {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
             "mlp_only_layers": [2]},
        ),
        (
            {"model_type": "qwen2_moe", "num_hidden_layers": 24, "decoder_sparse_step": 2},
            {"decoder_sparse_step": 1, "mlp_only_layers": [0]},
        ),
        (
            {"model_type": "lfm2", "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8]},
            {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
        ),
        (
            {"model_type": "smollm3", "num_hidden_layers": 36},
            {"no_rope_layers": [1, 0]},
        ),
    ],
)  # fmt: skip
def test_every_kind_of_layer_occurs(config: dict[str, Any], expected: dict[str, Any]) -> None:
    twin = shrink(config)
    assert {key: twin[key] for key in expected} == expected


def test_rotary_tables_follow_the_heads() -> None:
    factors = [1.0 + i for i in range(48)]
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    twin = shrink({"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24,
                   "partial_rotary_factor": 0.75, "rope_scaling": rope})  # fmt: skip
    assert len(twin["rope_scaling"]["long_factor"]) == 3  # half of 0.75 of a head of 8


def test_a_wrapper_whose_text_model_is_flat() -> None:
    twin = shrink({
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064,
        "image_token_id": 151655, "video_token_id": 151656, "eos_token_id": 151645,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
    })  # fmt: skip
    assert "text_config" not in twin
    assert (twin["hidden_size"], twin["vision_config"]["out_hidden_size"]) == (HIDDEN, HIDDEN)
    assert twin["vision_config"]["depth"] == 2
    assert twin["rope_scaling"]["mrope_section"] == [2, 1, 1]
    assert len({twin["image_token_id"], twin["video_token_id"]}) == 2
    assert max(twin["image_token_id"], twin["video_token_id"], twin["eos_token_id"]) < VOCAB


def test_what_cannot_be_shrunk_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not know the model type 'no_such_model'"):
        shrink({"model_type": "no_such_model"})
    with pytest.raises(UnsupportedError, match="says nothing of num_attention_heads"):
        shrink({"model_type": "mamba"})
    with pytest.raises(CheckpointError, match="transformers refuses the config"):
        shrink({"model_type": "llama", "hidden_size": "many"})
