"""Tiny unquantised models, in sizes that the engines take on a CPU."""

import make_tiny_model as tiny
import torch
from transformers import AutoConfig, PreTrainedModel

# The rows of every part of a fused layer are multiples of 128, as vLLM asks of swizzled scales.
_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    # Random embeddings that are the head too leave quantised layers no say in the logits.
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_OWN = {
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        # As files on the hub have it: transformers saves no topk_method and no scoring_func, which
        # vLLM needs. Under the default rotation the logits of vLLM 0.32 on a CPU are others from
        # the second token on, unquantised too.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        # vLLM's latent attention takes 512 + 64 columns alone.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


def make(model_type: str) -> PreTrainedModel:
    """Two random layers; one of experts has four of them, of which a token takes two."""
    config = AutoConfig.for_model(model_type, **(_COMMON | _OWN.get(model_type, {})))
    model = tiny.make_model(config)
    if model_type == "gemma":
        # It multiplies them by this, after which layers would have no say either.
        with torch.no_grad():
            model.get_input_embeddings().weight.div_(config.hidden_size**0.5)
    return model
