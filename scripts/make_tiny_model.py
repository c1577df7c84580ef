"""Make a tiny random checkpoint of a real architecture, with a tokenizer that works.

    python scripts/make_tiny_model.py llama OUT --hidden 128 --layers 2
    python scripts/make_tiny_model.py qwen3_moe OUT

Sizes are options of the plainest model types. The others get the twin that `nvfp4 check-model`
makes, with every kind of layer, a few experts and a vision tower, in sizes that can be quantised.

Nothing is left at its initial value: a norm gain that stayed 1, a bias that stayed 0 or an
embedding whose rows have mean 0 would hide a fault in folding, rotating or merging them.
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as READS,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEES,
)

from nvfp4cli.check.shrink import HIDDEN, VOCAB, configuration, shrink
from nvfp4cli.models.spec import known

SHAPED = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")  # take a Shape
MODEL_TYPES = tuple(name for name in known() if name in READS or name in SEES)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = """
The harbour lay still under a thin grey mist when the first boats came home. Their owners had been
out since two in the morning, eleven of them, and they had little to show for it: four baskets of
herring, a torn net, and one very small lobster that nobody wanted to measure. Old Maren counted
the baskets twice, wrote the number 4 into her notebook, and shook her head. "It was never like
this," she said, although it had been exactly like this in 1987, and again in 2003.

In the school above the harbour the children were learning to divide. A teacher had drawn sixteen
circles on the board and asked how many groups of four they made. Some counted with their fingers,
some guessed, and one girl said that it depended on whether the last circle, which was not quite
closed, should count as a circle at all. The teacher thought about this for longer than he had
planned to. Then he closed the circle with a piece of yellow chalk, and said: "Now it does."

By noon the wind had turned to the north-east and cleared the sky. From the top of the lighthouse,
93 steps above the rocks, you could see both islands and the ferry between them, moving so slowly
that it seemed to be painted on the water. The keeper read the barometer, 1013.2 hPa, compared it
with yesterday's reading, and entered the difference. He liked small differences. A large one meant
work, and usually a night without sleep; a small one meant that tomorrow would be much like today.

def mean(values):
    total = sum(values)
    return total / len(values)  # raises ZeroDivisionError for an empty list

Nothing that happened that week was ever printed in a newspaper. Still, when the people of the
harbour spoke about it many years afterwards, they agreed on every detail except the lobster, which
had grown, in the telling, to the size of a dog.
"""


@dataclass(frozen=True)
class Shape:
    """Sizes and switches of a tiny model. None means: as the configuration class has it."""

    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None
    vocab: int = 512
    tie: bool = False
    attention_bias: bool | None = None
    mlp_bias: bool | None = None

    def __post_init__(self) -> None:
        smallest = len(SPECIAL_TOKENS) + 256  # the bytes
        if self.vocab < smallest:
            raise ValueError(f"vocab is {self.vocab}, a byte-level tokenizer needs {smallest}")


_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
# Where the defaults of a configuration class leave out a kind of layer, or what a model needs.
_SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2": {"full_attn_idxs": [2, 5, 8]},
    "llama4_text": {"interleave_moe_layer_step": 2, "moe_layers": list(range(1, 48, 2))},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "qwen2_vl": {"text_config": {"rope_parameters": _SECTIONS}},
    "qwen3_moe": {"mlp_only_layers": [1]},
}
# Sizes that can be quantised, by their names in config.json, where a twin's cannot, or are too
# small for a tokenizer and a text.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "block_ff_dim"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    "q_lora_rank": 32,
    "v_head_dim": 16,
    "mrope_section": [2, 3, 3],
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1024),
}
_HEADS = ("num_attention_heads", "n_head", "num_key_value_heads")
_TOKENS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}


def make_config(model_type: str, shape: Shape | None = None) -> PretrainedConfig:
    """Configuration of one of MODEL_TYPES.

    ValueError for a shape that is not for this architecture, or a switch that it lacks.
    """
    if model_type in SHAPED:
        return _shaped(model_type, shape or Shape())
    if shape is not None:
        raise ValueError(f"{model_type} has sizes of its own, only {', '.join(SHAPED)} take others")
    base = AutoConfig.for_model(model_type, **_SETTINGS.get(model_type, {}))
    return configuration(_grown(shrink(base.to_diff_dict())) | {"model_type": model_type})


def _grown(twin: dict[str, Any]) -> dict[str, Any]:
    """A twin's config.json, of which each part is a level, in sizes that can be quantised."""
    return {
        key: _grown(value) if isinstance(value, dict) else _grown_entry(key, value)
        for key, value in twin.items()
    }


def _grown_entry(key: str, value: Any) -> Any:
    if key in _TOKENS:
        return _TOKENS[key]
    if not value:  # there is no such part
        return value
    if key.endswith(("_token_id", "_token_index")):  # those of pictures stay the last ones
        return value + Shape.vocab - VOCAB
    if value == VOCAB and "vocab" in key:
        return Shape.vocab
    if value == HIDDEN:  # a width has many names
        return Shape.hidden
    return min(value, Shape.heads) if key in _HEADS else _SIZES.get(key, value)


def _shaped(model_type: str, shape: Shape) -> PretrainedConfig:
    base = AutoConfig.for_model(model_type)
    options: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tie,
        "max_position_embeddings": 1024,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    for name in ("head_dim", "attention_bias", "mlp_bias"):
        value = getattr(shape, name)
        if value is not None and not hasattr(base, name):
            raise ValueError(f"{model_type} has no {name}: its configuration does not know it")
        if value is not None:
            options[name] = value
    if shape.head_dim is None and hasattr(base, "head_dim"):
        options["head_dim"] = shape.hidden // shape.heads
    if model_type == "granite":
        # Anything but 1, so that code which forgets one of them is caught.
        options |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        options |= {"logits_scaling": 8.0, "attention_multiplier": 0.125}
    return AutoConfig.for_model(model_type, **options)


def make_model(
    config: PretrainedConfig, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> PreTrainedModel:
    """A model with every parameter random, the same for the same seed, in `dtype`."""
    auto = AutoModelForImageTextToText if config.model_type in SEES else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    # A router's correction of its scores is a buffer, and trained all the same.
    trained = {k: v for k, v in model.named_buffers() if k in stored and k.endswith("bias")}
    with torch.no_grad():
        # By name, so that the values do not depend on the order of construction.
        for name, value in sorted((dict(model.named_parameters()) | trained).items()):
            owner = model.get_submodule(name.rpartition(".")[0])
            value.data = _random(name, value, owner, generator).to(dtype)
    return model.eval()


def _random(name: str, initial: Tensor, owner: nn.Module, generator: torch.Generator) -> Tensor:
    noise = torch.randn(initial.shape, generator=generator)
    if name.endswith("bias"):
        return 0.2 * noise
    if initial.dim() < 2 or "Norm" in type(owner).__name__:
        return initial + 0.3 * noise  # the gain of a norm, about 1 or 0; also sinks and the like
    if isinstance(owner, nn.Embedding):
        return noise + 0.5 * torch.randn(initial.shape[0], 1, generator=generator)
    return noise / initial.shape[-1] ** 0.5  # keeps the variance of a unit-variance input


def save(model: PreTrainedModel, folder: Path, *, shards: int = 1) -> None:
    """Write a checkpoint folder: weights in exactly `shards` files, configuration, tokenizer."""
    model.save_pretrained(folder)
    if shards > 1:
        _split(folder, shards)
    make_tokenizer(_ordinary(model.config)).save_pretrained(folder)


def _split(folder: Path, shards: int) -> None:
    """Replace model.safetensors by `shards` files and an index, tensors dealt out in turn, so
    that partners of a shared scale lie in different files."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    if shards > len(tensors):
        raise ValueError(f"{shards} shards for {len(tensors)} tensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _ordinary(config: PretrainedConfig) -> int:
    """How many tokens there are before those that stand for pictures."""
    of_pictures = [
        value
        for key, value in config.to_dict().items()
        if key.endswith(("_token_id", "_token_index")) and key not in _TOKENS
    ]
    return min([config.get_text_config().vocab_size, *of_pictures])


def make_tokenizer(vocab: int) -> Any:
    """Byte-level BPE trained on CORPUS, at most `vocab` entries, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_type", choices=MODEL_TYPES)
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    sizes = parser.add_argument_group(f"sizes of {', '.join(SHAPED)}")
    for field in fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        if field.type in (bool, bool | None):
            sizes.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            sizes.add_argument(flag, type=int, help=f"default: {field.default}")
    return parser


def main() -> None:
    parser = _parser()
    args = vars(parser.parse_args())
    given = {f.name: args[f.name] for f in fields(Shape) if args[f.name] is not None}
    try:
        config = make_config(args["model_type"], Shape(**given) if given else None)
    except ValueError as error:
        parser.error(str(error))
    model = make_model(config, dtype=DTYPES[args["dtype"]], seed=args["seed"])
    save(model, args["out"], shards=args["shards"])
    print(args["out"])


if __name__ == "__main__":
    main()
