#!/usr/bin/env python
"""Time and memory of `nvfp4 quantize`, as ratios and bounds that hold on any machine.

    python scripts/bench_quantize.py speed MODEL [--runs 5] [--layout torchao] [--device cpu]
    python scripts/bench_quantize.py memory [--gigabytes 4] [--rotate none]

speed: quantising a checkpoint against loading and saving the same bytes with safetensors, in one
process, turn about, the page cache warm; process start and imports are excluded. The ratio of the
medians is the figure. With --device cuda the shares of the time that the GPU computed and took in
copies are printed beside it.

memory: peak resident memory of a run above the interpreter's own (everything imported), on a
synthetic Llama of random weights whose largest group has fewer than 100 MB.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nvfp4cli import pipeline
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.pipeline import Event
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.plan.record import Plan
from nvfp4cli.recipe import Recipe

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 2560, 6912, 20, 5, 32000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("model", type=Path)
    speed.add_argument("--runs", type=int, default=5)
    speed.add_argument("--layout", default="torchao")
    speed.add_argument("--device", default="cpu")
    memory = commands.add_parser("memory")
    memory.add_argument("--gigabytes", type=float, default=4.0)
    memory.add_argument("--rotate", default="none")
    child = commands.add_parser("peak")  # what `memory` starts
    child.add_argument("model", type=Path)
    child.add_argument("out", type=Path)
    child.add_argument("--rotate", default="none")
    options = parser.parse_args()
    if options.command == "speed":
        bench_speed(options.model, options.layout, options.runs, options.device)
    elif options.command == "memory":
        bench_memory(options.gigabytes, options.rotate)
    else:
        print(json.dumps(measure_peak(options.model, options.out, options.rotate)))


def bench_speed(model: Path, layout: str, runs: int, device: str) -> None:
    """Print the medians of both and their ratio, and of the last run how busy a GPU was."""
    copies, conversions = [], []
    last: deque[Event] = deque(maxlen=1)
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        for run in range(runs + 1):
            copied, converted = Path(scratch, "copy"), Path(scratch, "nvfp4")
            copies.append(_timed(lambda target=copied: _load_and_save(model, target)))
            plan = _plan(model, Recipe(layout=layout))
            events = pipeline.run(plan, converted, device=device)
            conversions.append(_timed(lambda events=events: last.extend(events)))
            if run == 0:  # the first turn warms the page cache, the allocator and the threads
                copies.clear()
                conversions.clear()
            shutil.rmtree(copied)
            shutil.rmtree(converted)
    copy, conversion = statistics.median(copies), statistics.median(conversions)
    nbytes = open_checkpoint(model).nbytes
    print(f"checkpoint              {nbytes / 1e6:9.1f} MB, {torch.get_num_threads()} threads")
    print(f"safetensors load + save {copy:9.3f} s  {nbytes / copy / 1e6:8.0f} MB/s")
    print(f"quantize to {layout:<12}{conversion:9.3f} s  {nbytes / conversion / 1e6:8.0f} MB/s")
    print(f"ratio                   {conversion / copy:9.2f}")
    if last[0].kind == "summary":
        print(f"GPU computing           {100 * last[0].computing:9.1f} % of the last run")
        print(f"GPU receiving copies    {100 * last[0].copying:9.1f} %")


def _timed(action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _load_and_save(model: Path, target: Path) -> None:
    """Load into memory and save each file; a mapped tensor that is never touched is not loaded."""
    target.mkdir()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            save_file({name: f.get_tensor(name) for name in f.offset_keys()}, target / file.name)


def _plan(model: Path, recipe: Recipe) -> Plan:
    return plan_quantize(
        open_checkpoint(model), recipe, model=str(model), arch_spec=None, strict=False
    )


def _run(plan: Plan, target: Path) -> None:
    for _ in pipeline.run(plan, target):
        pass


def bench_memory(gigabytes: float, rotate: str) -> None:
    """Write a synthetic checkpoint, convert it in a fresh process, print that process's peak."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        write_synthetic(model, gigabytes)
        command = [sys.executable, __file__, "peak", str(model), str(Path(scratch, "out"))]
        result = subprocess.run(
            [*command, "--rotate", rotate], check=True, capture_output=True, text=True
        )
        figures = json.loads(result.stdout)
    print(f"checkpoint        {figures['source_bytes'] / 1e6:9.1f} MB")
    print(f"largest group     {figures['largest_group_bytes'] / 1e6:9.1f} MB")
    print(f"interpreter       {figures['before_bytes'] / 1e6:9.1f} MB resident")
    print(f"peak above it     {figures['above_bytes'] / 1e6:9.1f} MB")
    print(f"planned           {figures['planned_bytes'] / 1e6:9.1f} MB")


def measure_peak(model: Path, out: Path, rotate: str) -> dict[str, int]:
    """Run in this process; resident bytes before and at the peak."""
    plan = _plan(model, Recipe(rotate=rotate))
    # A process inherits its parent's peak; this starts the count anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    _run(plan, out)
    groups = [job.source_bytes for job in plan.jobs if job.members[0].action == "quantize"]
    return {
        "source_bytes": plan.source_bytes,
        "largest_group_bytes": max(groups),
        "before_bytes": before,
        "above_bytes": _peak_bytes() - before,
        "planned_bytes": plan.memory_bytes,
    }


def _peak_bytes() -> int:
    """Largest resident size since the count began (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def write_synthetic(folder: Path, gigabytes: float) -> None:
    """A Llama of random bf16 weights, one file a layer, of about the size asked for."""
    folder.mkdir()
    layer = layer_shapes(0)
    layer_bytes = sum(2 * torch.Size(shape).numel() for shape in layer.values())
    outer = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    outer_bytes = sum(2 * torch.Size(shape).numel() for shape in outer.values())
    layers = max(1, round((gigabytes * 1e9 - outer_bytes) / layer_bytes))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    parts = [outer, *(layer_shapes(i) for i in range(layers))]
    generator = torch.Generator().manual_seed(0)
    for i, shapes in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = {
            name: torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def layer_shapes(number: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a decoder layer."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


if __name__ == "__main__":
    main()
