"""As in_transformers.py, with one fault of transformers mended.

    python in_transformers_fixed.py REQUESTS

transformers 5.24 merges the experts of a layer into one tensor while it loads them, and decodes
them for that. It collects the four tensors of each but hands three to compressed-tensors, so that
experts come out too large by their global scale, thousands of times, without an error
(huggingface/transformers#48371). Here the fourth is handed on too. All else is transformers' own:
the names, the decoding, the merging and the model.
"""

import sys
from pathlib import Path

import in_transformers
import requested
import torch
from compressed_tensors.compressors import BaseCompressor
from torch import Tensor
from transformers.integrations.compressed_tensors import (
    CompressedTensorsDequantize,
    get_experts_scheme,
)
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

PACKED = ".weight_packed"
LEAVES = ("weight_packed", "weight_scale", "weight_global_scale")


class DequantizeExperts(CompressedTensorsDequantize):
    """Decodes a layer's experts with their global scales."""

    def convert(self, input_dict: dict[str, list[Tensor]], *args, **kwargs) -> dict[str, Tensor]:
        modules = [name.removesuffix(PACKED) for name in input_dict if name.endswith(PACKED)]
        if not modules:  # a weight that is not one expert's
            return super().convert(input_dict, *args, **kwargs)
        scheme = get_experts_scheme(self.hf_quantizer.compressor.quantization_config)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        merged = {}
        for module in modules:
            experts = zip(*(input_dict[f"{module}.{leaf}"] for leaf in LEAVES), strict=True)
            states = [dict(zip(LEAVES, expert, strict=True)) for expert in experts]
            weights = [compressor.decompress(state, scheme)["weight"] for state in states]
            merged[module + PACKED] = torch.stack(weights)
        return merged


if __name__ == "__main__":
    CompressedTensorsHfQuantizer.get_load_operations = lambda _: {"dequantize": DequantizeExperts}
    requested.answer(Path(sys.argv[1]), in_transformers.logits)
