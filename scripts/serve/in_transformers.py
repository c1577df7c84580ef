"""Logits of NVFP4 checkpoints from transformers, through compressed-tensors or torchao.

    python in_transformers.py REQUESTS

See check.py for what REQUESTS holds and what is written.
"""

import sys
from pathlib import Path

import requested
import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats import nvfp4_tensor
from transformers import AutoModelForCausalLM


def product(
    a: nvfp4_tensor.NVFP4Tensor,
    b: nvfp4_tensor.NVFP4Tensor,
    operation: object,
    bias: Tensor | None = None,
) -> Tensor:
    """[T, N]: the operands as torchao has rounded them, multiplied in their dtype.

    In place of torchao's own, which multiplies in 4 bits and needs a Blackwell GPU for it.
    """
    found = a.dequantize() @ b.dequantize()
    return found if bias is None else found + bias


def logits(request: requested.Request) -> Tensor:
    """fp32 [T, V], computed in fp32 from the weights as transformers decodes them."""
    model, report = AutoModelForCausalLM.from_pretrained(
        request.checkpoint,
        dtype=getattr(torch, request.dtype),
        local_files_only=True,
        output_loading_info=True,
    )
    left = {what: sorted(map(str, names)) for what, names in report.items() if names}
    if left:
        some = (f"{len(names)} {what}, {names[0]} first" for what, names in left.items())
        raise RuntimeError(f"transformers reports {'; '.join(some)}")
    ids = torch.tensor([request.tokens])
    with torch.inference_mode():
        if request.dtype != "float32":
            # compressed-tensors decodes in the first forward pass. After it every weight is dense
            # and can be widened, which the model's own `float` refuses for quantised models.
            model(input_ids=ids[:, :1])
            nn.Module.float(model)
        return model(input_ids=ids, use_cache=False).logits[0].float()


if __name__ == "__main__":
    nvfp4_tensor._addmm_nvfp4_dispatch = product
    requested.answer(Path(sys.argv[1]), logits)
