"""Logits of NVFP4 checkpoints in ComfyUI's layout, decoded by its own comfy-kitchen.

    python in_comfy.py REQUESTS

See check.py for what REQUESTS holds and what is written. comfy-kitchen unswizzles the scales and
decodes the weights; transformers computes with them.
"""

import json
import sys
from pathlib import Path

import requested
import torch
from comfy_kitchen.backends.eager.quantization import dequantize_nvfp4
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM, Qwen2ForCausalLM

MODELS = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}
MARKER = ".comfy_quant"


def logits(request: requested.Request) -> Tensor:
    """fp32 [T, V]."""
    folder = Path(request.checkpoint)
    config = AutoConfig.from_pretrained(folder)
    model = MODELS[config.model_type](config).eval()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state = {}
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        module = name.removesuffix(MARKER)
        if name.endswith(MARKER):
            if json.loads(tensor.numpy().tobytes()) != {"format": "nvfp4"}:
                raise RuntimeError(f"{name} is {tensor.numpy().tobytes()}")
            weight = dequantize_nvfp4(
                stored[f"{module}.weight"],
                stored[f"{module}.weight_scale_2"],
                stored[f"{module}.weight_scale"],
                torch.float32,
            )
            rows, columns = shapes[f"{module}.weight"]  # ComfyUI takes them from the model too
            state[f"{module}.weight"] = weight[:rows, :columns]
        elif f"{name.rpartition('.')[0]}{MARKER}" not in stored or name.endswith(".bias"):
            state[name] = tensor.float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    with torch.inference_mode():
        return model(torch.tensor([request.tokens]), use_cache=False).logits[0]


if __name__ == "__main__":
    requested.answer(Path(sys.argv[1]), logits)
