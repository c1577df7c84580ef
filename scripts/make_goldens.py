#!/usr/bin/env python
"""Make the small checkpoints of other tools that tests/data holds.

    python scripts/make_goldens.py llm-compressor   (pip install llmcompressor==0.14.0.1)
    python scripts/make_goldens.py modelopt         (pip install 'nvidia-modelopt[hf]==0.47.0')

Each tool quantises the same tiny random Llama on the CPU, weight-only and W4A4. The results are
kept in the tree because the tools are large and move: the tests read them as any user's file.
"""

import argparse
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DATA = Path(__file__).parents[1] / "tests" / "data"
SOURCE = DATA / "source"
SEQUENCES, LENGTH = 4, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=("llm-compressor", "modelopt"))
    tool = parser.parse_args().tool
    if not SOURCE.exists():
        make_source()
    for scheme in ("w4a16", "w4a4"):
        out = DATA / f"{tool}-{scheme}"
        shutil.rmtree(out, ignore_errors=True)
        (with_llm_compressor if tool == "llm-compressor" else with_modelopt)(scheme, out)
        for extra in out.iterdir():
            if extra.suffix not in (".safetensors", ".json") or extra.name.startswith("generation"):
                extra.unlink()


def make_source() -> None:
    """A Llama with every parameter random and no tokenizer; 1 layer, grouped heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.to(torch.bfloat16).save_pretrained(SOURCE)
    (SOURCE / "generation_config.json").unlink()


def tokens() -> torch.Tensor:
    """[sequences, length] ids to calibrate on."""
    return torch.randint(64, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))


def with_llm_compressor(scheme: str, out: Path) -> None:
    """QuantizationModifier with the presets NVFP4A16 and NVFP4."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.bfloat16)
    preset = {"w4a16": "NVFP4A16", "w4a4": "NVFP4"}[scheme]
    recipe = QuantizationModifier(targets="Linear", scheme=preset, ignore=["lm_head"])
    ids = tokens().tolist()
    mask = [[1] * LENGTH] * SEQUENCES
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": mask})
    calibration = {}
    if scheme == "w4a4":
        # The ids are given, but the tool insists on something to make ids with.
        words = Tokenizer(WordLevel({"x": 0}, unk_token="x"))
        processor = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="x")
        calibration = {
            "dataset": data,
            "num_calibration_samples": SEQUENCES,
            "processor": processor,
        }
    oneshot(model=model, recipe=recipe, **calibration)
    model.save_pretrained(out, save_compressed=True)


def with_modelopt(scheme: str, out: Path) -> None:
    """NVFP4_DEFAULT_CFG, with the input quantisers off for weight-only."""
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.bfloat16)
    names = {"w4a16": "W4A16_NVFP4_CFG", "w4a4": "NVFP4_DEFAULT_CFG"}
    config = copy.deepcopy(getattr(mtq, names[scheme]))
    mtq.quantize(model, config, lambda m: m(tokens()))
    export_hf_checkpoint(model, export_dir=out)


if __name__ == "__main__":
    main()
