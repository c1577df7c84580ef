"""A configuration made small: sizes go down, and everything that decides the architecture stays.

The rules go by what the keys of config.json mean, whatever the model type: flags, multipliers,
ties, biases, activations and the kinds of layers are kept, and so are the names under which the
source states its sizes.
"""

import copy
import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from transformers import CONFIG_MAPPING, PreTrainedConfig

from nvfp4cli.check.layers import choose, stated_as
from nvfp4cli.errors import CheckpointError, UnsupportedError

HIDDEN = 48
VOCAB = 128
ORDINARY = 100  # tokens from here on stand for pictures and the like

_HEAD_DIM = 16
_FEWER_HEADS = 4  # times 16 is more than the hidden size, as in many models
_SPLIT_HEADS = 6  # where the hidden size is split into heads: 8 values each

# Sizes of a twin by their names in config.json. A source's 0 or null says that there is no such
# part, and stays.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), HIDDEN),
    **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "block_ff_dim"), 80),
    "intermediate_size_mlp": 64,
    "moe_intermediate_size": 24,
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), VOCAB),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    # Short enough to matter for the tokens of a comparison.
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "floor_scale"), 8),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "block_multiple_of": 16,
}  # fmt: skip
_AT_MOST = {
    **dict.fromkeys(("num_experts_per_tok", "n_group", "mamba_n_groups"), 2),
    "topk_group": 1,
}
_HEADS = ("num_attention_heads", "n_head")
# What a text model takes where its config.json has no mrope_section.
_SECTIONS = {"qwen2_vl_text": [16, 24, 24], "qwen2_5_vl_text": [16, 24, 24]}
_WIDTHS = ("hidden_size", "n_embd", "d_model")

# Of the vision tower of a wrapper.
_PATCH, _IMAGE = 4, 16
_VISION = {
    **dict.fromkeys(("hidden_size", "embed_dim", "projection_dim", "vision_output_dim"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), 32),
    "intermediate_size": 128,  # four times the width, which Llama 4 takes for granted
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "head_dim": 16,
    "patch_size": _PATCH,
    "image_size": _IMAGE,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": (_IMAGE // _PATCH) ** 2,
    "window_size": 2 * _PATCH * 2,  # two merged patches
}
_PAD = "pad_token_id"
_TEXT_TOKENS = ("bos_token_id", "eos_token_id", _PAD, "eod_token_id")
_TOKENS = ("_token_id", "_token_index")
_WRAPPER = {"image_seq_length": 16, "mm_tokens_per_image": 4, "vocab_size": VOCAB,
            "hidden_size": HIDDEN}  # fmt: skip


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a twin of the model that `config`, a parsed config.json, describes.

    It states what the source states, in the same names, and what has to be said besides. Raises
    UnsupportedError for a model type that the installed transformers does not know, and
    CheckpointError for a configuration that it refuses.
    """
    source = {key: value for key, value in config.items() if key != "quantization_config"}
    complete = configuration(source)
    text = complete.get_text_config()
    if text is complete:
        return _text(source, complete)
    twin = _merged(source, complete, _wrapper(source, complete))
    key = next((key for key in complete.sub_configs if getattr(complete, key, None) is text), None)
    if key is None:
        raise UnsupportedError(
            f"Where a {complete.model_type} model keeps its language model is not known: compare "
            "the logits of the whole model before and after a fold instead."
        )
    if key in source:
        twin[key] = _text(source[key], text)
    elif "num_hidden_layers" in source:  # the text model's sizes stand beside the parts
        twin |= _text(source, text) | {"model_type": source["model_type"]}
    else:
        twin[key] = _text({}, text)
    for key in complete.sub_configs:
        part = getattr(complete, key, None)
        if part is not text and isinstance(part, PreTrainedConfig):
            stated = source.get(key) or {}
            twin[key] = {"model_type": part.model_type} | _merged(stated, part, _vision(part))
    return _with_tokens(twin, complete)


def model_type_of(config: Mapping[str, Any]) -> str:
    """What a parsed config.json calls the model. Raises CheckpointError where it does not."""
    found = config.get("model_type")
    if not isinstance(found, str) or not found:
        said = f"gives {json.dumps(found)}" if "model_type" in config else "has none"
        raise CheckpointError(
            f'A config.json must name the model_type, such as "llama", and this one {said}: '
            "correct it, or name the config.json of a model."
        )
    return found


def configuration(config: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a parsed config.json. Raises what `shrink` raises."""
    model_type = model_type_of(config)
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers does not know the model type {model_type!r}, and a twin is made by it: "
            "install a release that does."
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(config))  # which it changes
    except Exception as error:  # its checks raise whatever they like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"transformers refuses the config.json ({reason}): correct it."
        ) from error


def unstated(config: dict[str, Any]) -> list[str]:
    """Sizes that a parsed config.json leaves out and for which transformers has no default."""
    complete = configuration(config).get_text_config().to_dict()
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return [
        name
        for name in ("head_dim", "num_key_value_heads", *_AT_MOST)
        if name in complete and complete[name] is None and not any(name in part for part in parts)
    ]


def _text(stated: Mapping[str, Any], complete: PreTrainedConfig) -> dict[str, Any]:
    """A text model's configuration. complete: what transformers makes of `stated`."""
    values = {**stated, **complete.to_dict()}
    changes: dict[str, Any] = {}
    for key, size in _SIZES.items():
        if values.get(key):
            changes[key] = size
    for key, most in _AT_MOST.items():
        if values.get(key):
            changes[key] = min(values[key], most)
    if (width := values.get("word_embed_proj_dim")) and width != values["hidden_size"]:
        changes["word_embed_proj_dim"] = 32  # OPT projects its embeddings
    elif width:
        changes["word_embed_proj_dim"] = HIDDEN
    changes |= _heads(stated, complete, values) | choose(values)
    ratio = _head_dim(changes) / _head_dim(values)
    for key in ("rope_parameters", "rope_scaling"):
        if values.get(key):
            changes[key] = _rope(values[key], ratio)
            if sections := _SECTIONS.get(complete.model_type):
                changes[key] = _rope({"mrope_section": sections, **values[key]}, ratio)
    if "original_max_position_embeddings" in values:
        changes["original_max_position_embeddings"] = 16
    twin = _merged(stated, complete, changes)
    return _with_tokens({"model_type": complete.model_type} | twin, complete)


def _heads(
    stated: Mapping[str, Any], complete: PreTrainedConfig, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Few heads, grouped as the source's: each its own values, one for all, or two groups."""
    name = stated_as(_HEADS, values)
    latent = bool(values.get("qk_rope_head_dim"))  # DeepSeek's heads have sizes of their own
    fixed = stated.get("head_dim") or getattr(type(complete), "head_dim", None)
    few = _FEWER_HEADS if fixed or latent else _SPLIT_HEADS
    changes: dict[str, Any] = {name: few}
    if fixed:
        changes["head_dim"] = _SIZES["qk_rope_head_dim"] if latent else _HEAD_DIM
    if groups := values.get("num_key_value_heads"):
        changes["num_key_value_heads"] = {values[name]: few, 1: 1}.get(groups, 2)
    return changes


def _head_dim(values: Mapping[str, Any]) -> float:
    """Of what is rotated by position, or a multiple of it."""
    split = values[stated_as(_WIDTHS, values)] / values[stated_as(_HEADS, values)]
    return values.get("qk_rope_head_dim") or values.get("head_dim") or split


def _rope(rope: Any, ratio: float) -> Any:
    """Rotary parameters for heads `ratio` times as wide: tables and sections get shorter."""
    if not isinstance(rope, dict):
        return rope
    found = {}
    for key, value in rope.items():
        if isinstance(value, dict):  # one for each type of layer
            found[key] = _rope(value, ratio)
        elif key in ("short_factor", "long_factor"):
            found[key] = value[: max(1, round(len(value) * ratio))]
        elif key == "mrope_section":
            sections = [int(section * ratio) for section in value]
            sections[0] += round(sum(value) * ratio) - sum(sections)
            found[key] = sections
        else:
            found[key] = 16 if key == "original_max_position_embeddings" else value
    return found


def _wrapper(stated: Mapping[str, Any], complete: PreTrainedConfig) -> dict[str, Any]:
    values = {**stated, **complete.to_dict()}
    changes: dict[str, Any] = {key: size for key, size in _WRAPPER.items() if values.get(key)}
    if values.get("image_grid_pinpoints"):
        changes["image_grid_pinpoints"] = [[_IMAGE, 2 * _IMAGE], [2 * _IMAGE, _IMAGE]]
    return changes


def _vision(complete: PreTrainedConfig) -> dict[str, Any]:
    """A small tower of two layers."""
    values = complete.to_dict()
    changes: dict[str, Any] = {}
    for key, size in _VISION.items():
        if value := values.get(key):
            changes[key] = [size] * len(value) if isinstance(value, list | tuple) else size
    if "embed_dim" in changes and "hidden_size" in changes:
        changes["hidden_size"] = HIDDEN  # Qwen2-VL calls the width of its output so
    changes |= {key: 2 for key in ("num_hidden_layers", "depth") if key in values}
    if values.get("deepstack_visual_indexes"):  # each feeds one of the text model's first layers
        changes["deepstack_visual_indexes"] = [0, 1]
    if values.get("fullatt_block_indexes"):
        changes["fullatt_block_indexes"] = [1]
    return changes


def _merged(
    stated: Mapping[str, Any], complete: PreTrainedConfig, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """What the source states, changed, and the changes of what it leaves to the defaults."""
    defaults = complete.to_dict()
    aliases = complete.attribute_map | {"rope_scaling": "rope_parameters"}
    said = {aliases.get(key, key) for key in stated}
    twin = {key: changes.get(key, changes.get(aliases.get(key, ""), value))
            for key, value in stated.items()}  # fmt: skip
    for key, value in changes.items():
        if key not in twin and aliases.get(key, key) not in said and defaults.get(key) != value:
            twin[key] = value
    return twin


def _with_tokens(twin: dict[str, Any], complete: PreTrainedConfig) -> dict[str, Any]:
    """Special tokens inside the vocabulary, those of pictures apart from ordinary ones.

    complete: the source's, whose defaults the twin must not fall back to where they lie outside:
    models have a row of the embedding for padding, and look for the tokens of pictures.
    """
    aliases = complete.attribute_map
    said = {aliases.get(key, key) for key in twin}
    for key, value in complete.to_dict().items():
        looked_up = key == _PAD or (key.endswith(_TOKENS) and key not in _TEXT_TOKENS)
        if looked_up and aliases.get(key, key) not in said and _beyond(value):
            twin[key] = value
    place = VOCAB
    for key in sorted(twin):
        value = twin[key]
        if key in _TEXT_TOKENS:
            few = [n % ORDINARY for n in value] if isinstance(value, list) else value
            twin[key] = few % ORDINARY if _beyond(few) else few
        elif key.endswith(_TOKENS) and isinstance(value, int):
            place -= 1
            twin[key] = place
    return twin


def _beyond(token: Any) -> TypeGuard[int]:
    """True for the number of a token that a twin's vocabulary does not have."""
    return isinstance(token, int) and token >= VOCAB
