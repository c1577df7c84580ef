"""Time and memory of calibration: one decoder layer of Llama-3.1-8B's shape, random weights.

    python scripts/bench_calibrate.py --method gptq --scheme w4a4 --sequences 128 --length 2048

Prints the seconds that the layer takes once the kernels are compiled, from its weights on the disk
to codes in memory, and the peak of the device's memory. --hidden and --intermediate give another
shape, for machines without a GPU.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from nvfp4cli import pipeline
from nvfp4cli.calibrate.text import Sequences
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.recipe import Recipe

VOCABULARY = 1024


def checkpoint(folder: Path, hidden: int, intermediate: int) -> None:
    """Two layers, so that the second is timed without compilation."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), options.hidden, options.intermediate)
        recipe = Recipe(layout="modelopt", method=options.method, scheme=options.scheme)
        plan = plan_quantize(
            open_checkpoint(Path(folder)), recipe, model="bench", arch_spec=None, strict=False
        )
        generator = torch.Generator().manual_seed(0)
        shape = options.sequences, options.length
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        began = time.perf_counter()
        for event in pipeline.measure(plan, Sequences(tokens, {}), device):
            now = time.perf_counter()
            print(f"{event.stage}: {now - began:.1f} s", flush=True)
            began = now
    if device == "cuda":
        print(f"peak memory of the device: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
