"""Configurations of every model type that a twin can be made of, and what is true of each.

Built from transformers' own defaults, with what makes an architecture interesting switched on:
every kind of layer, biases, norms of heads, multipliers other than 1.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig


@dataclass(frozen=True)
class Case:
    """A model type with settings beside its defaults; refused: the rotations that cannot hold."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    name: str = ""

    @property
    def id(self) -> str:
        """For people."""
        return f"{self.model_type}-{self.name}" if self.name else self.model_type

    @property
    def config(self) -> dict[str, Any]:
        """A config.json as transformers writes it, which leaves the defaults out."""
        made = AutoConfig.for_model(self.model_type, **copy.deepcopy(self.settings))
        return {**made.to_diff_dict(), **self.settings}  # under the names given here


def case(model_type: str, *, refused: str = "", name: str = "", **settings: Any) -> Case:
    return Case(model_type, settings, frozenset(refused.split()), name)


_BIASES = {"attention_bias": True, "mlp_bias": True}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
            "attention_multiplier": 0.125}  # fmt: skip
_FALCON = {
    "embedding_multiplier": 5.6, "lm_head_multiplier": 0.04, "mlp_multipliers": [0.9, 0.3],
    "key_multiplier": 0.4, "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.35, 0.25, 0.3, 0.5, 0.4], "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.25,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                              "mrope_section": [16, 24, 24]}}  # fmt: skip

TEXT = (
    case("llama"),
    case("llama", name="biases", tie_word_embeddings=True, num_key_value_heads=8, **_BIASES),
    case("mistral"),
    case("qwen2"),
    case("qwen2", name="tied", tie_word_embeddings=True, num_key_value_heads=2),
    case("qwen3"),
    case("qwen3", name="biases", attention_bias=True, head_dim=64),
    case("smollm3"),
    case("granite", **_GRANITE),
    case("qwen2_moe", decoder_sparse_step=2),
    case("qwen3_moe", mlp_only_layers=[1], num_experts=128, num_experts_per_tok=8, head_dim=64),
    case("mixtral"),
    case("glm", attention_bias=True),
    case("glm4", refused="r1", attention_bias=True),
    case("glm4_moe", use_qk_norm=True, attention_bias=True, head_dim=128),
    case("deepseek_v2", num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None),
    case("deepseek_v3"),
    case("gemma"),
    case("gemma2", refused="r1"),
    case("gemma3_text", refused="r1"),
    case("phi3"),
    case("olmo2", refused="r1"),
    case("olmo3", refused="r1"),
    case("exaone4", refused="r1"),
    case("gpt_oss"),
    case("granitemoe", **_GRANITE),
    case("llama4_text", interleave_moe_layer_step=2, moe_layers=list(range(1, 48, 2))),
    case("qwen3_next", refused="r2", mlp_only_layers=[1]),
    case("qwen3_5_text", refused="r2"),
    case("qwen3_5_moe_text", refused="r2"),
    case("cohere", use_qk_norm=True),
    case("cohere2"),
    case("stablelm", use_qkv_bias=True, qk_layernorm=True),
    case("opt"),
    case("gpt2"),
    case("phi", qk_layernorm=True),
    case("starcoder2"),
    case("nemotron", num_key_value_heads=8),
    case("minimax_m2"),
    case("hunyuan_v1_dense", head_dim=128, num_key_value_heads=8),
    case("ernie4_5", use_bias=True),
    case("seed_oss", attention_bias=True, attention_out_bias=True, mlp_bias=True),
    case("apertus"),
    case("lfm2", full_attn_idxs=[2, 5, 8]),
    case("falcon_h1", **_FALCON),
    case("llama4"),  # how it takes a picture is not known
)
PICTURES = (
    case("llava"),
    case("llava_next"),
    case("qwen2_vl", text_config=_MROPE),
    case("qwen2_vl", name="bare"),
    case("qwen2_5_vl", text_config=_MROPE),
    case("qwen3_vl"),
    case("mistral3", tie_word_embeddings=False),
    case("internvl", tie_word_embeddings=False),
    case("gemma3", refused="r1"),
    case("qwen3_5", refused="r2"),
    case("qwen3_5_moe", refused="r2"),
)
ALL = TEXT + PICTURES
