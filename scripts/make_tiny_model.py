"""Make a tiny random checkpoint of a real architecture, with a tokenizer that works.

    python scripts/make_tiny_model.py llama OUT --hidden 128 --layers 2

Nothing is left at its initial value: a norm gain that stayed 1, a bias that stayed 0 or an
embedding whose rows have mean 0 would hide a fault in folding, rotating or merging them.
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite")
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


def make_config(model_type: str, shape: Shape) -> PretrainedConfig:
    """Configuration of one of MODEL_TYPES. ValueError for a switch this architecture lacks."""
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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # By name, so that the values do not depend on the order of construction.
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_random(name, parameter, generator))
    return model.to(dtype).eval()


def _random(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if name.endswith(".bias"):
        return 0.2 * noise
    if like.dim() == 1:
        return 1 + 0.3 * noise  # the gain of a norm
    if "embed_tokens" in name:
        return noise + 0.5 * torch.randn(like.shape[0], 1, generator=generator)
    return noise / like.shape[1] ** 0.5  # keeps the variance of a unit-variance input


def save(model: PreTrainedModel, folder: Path, *, shards: int = 1) -> None:
    """Write a checkpoint folder: weights in exactly `shards` files, configuration, tokenizer."""
    model.save_pretrained(folder)
    if shards > 1:
        _split(folder, shards)
    make_tokenizer(model.config.vocab_size).save_pretrained(folder)


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
    for field in fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        if field.type in (bool, bool | None):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(flag, type=int, default=field.default)
    return parser


def main() -> None:
    args = vars(_parser().parse_args())
    shape = Shape(**{field.name: args[field.name] for field in fields(Shape)})
    model = make_model(
        make_config(args["model_type"], shape), dtype=DTYPES[args["dtype"]], seed=args["seed"]
    )
    save(model, args["out"], shards=args["shards"])
    print(args["out"])


if __name__ == "__main__":
    main()
