"""Logits of NVFP4 checkpoints from vLLM on a CPU.

    python in_vllm.py REQUESTS

See check.py for what REQUESTS holds and what is written.

vLLM reads the torchao layout on a CPU as it comes. For compressed-tensors and modelopt it has
weight-only NVFP4 kernels for GPUs alone, so `DequantizedLinear` and `DequantizedExperts` below take
the places of two. All that reads a file is vLLM's own: the configuration, the names, the fusing of
q/k/v, gate/up and experts, the choice of the shared global scale, the guard against scales that
were never loaded, and the dequantisation. Products of layers are left to torch, those of experts to
vLLM's kernel for unquantised ones.
"""

import os
import sys
from pathlib import Path

# In this process, where the kernel is registered and the logits can be had.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import requested
import torch
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as experts
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum


class DequantizedLinear(linear.NvFp4LinearKernel):
    """Weight-only NVFP4 for a CPU: dequantised by vLLM after loading, multiplied by torch."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: linear.NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.dequantized = dequantize_to_dtype(
            layer.weight.data,
            layer.weight_scale.data,
            layer.weight_global_scale.data,
            torch.float32,
            swizzle=False,
        )

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.dequantized, bias)


class DequantizedExperts(CPUUnquantizedExperts):
    """Weight-only NVFP4 experts for a CPU: dequantised by vLLM after loading."""

    @staticmethod
    def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
        return activation_key is None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for name in ("w13_weight", "w2_weight"):
            stored = (getattr(layer, name + suffix).data for suffix in ("", "_scale", "_scale_2"))
            weight = dequantize_to_dtype(*stored, layer.params_dtype, swizzle=False)
            replace_parameter(layer, name, weight)  # [E, N, K]
        super().process_weights_after_loading(layer)


def only_dequantized(backend: experts.NvFp4MoeBackend) -> list[type[DequantizedExperts]]:
    return [DequantizedExperts] if backend is experts.NvFp4MoeBackend.MARLIN else []


def as_stored(layer: nn.Module, is_act_and_mul: bool, **tensors: Tensor) -> tuple[Tensor, ...]:
    """In place of the order that Marlin's kernel wants the experts' tensors in."""
    return tuple(tensors.values())


def register() -> None:
    """Put the two where vLLM looks for its weight-only kernels, in fp32 too.

    Layers with 4-bit inputs get vLLM's own emulation, which it offers to GPUs alone.
    """
    linear.MarlinNvFp4LinearKernel = DequantizedLinear
    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationNvFp4LinearKernel]
    experts.backend_to_kernel_cls = only_dequantized
    experts.prepare_nvfp4_moe_layer_for_marlin = as_stored
    ModelOptNvFp4Config.get_supported_act_dtypes = lambda _: [torch.bfloat16, torch.float32]


def logits(request: requested.Request) -> Tensor:
    """fp32 [T - 1, V]: those that vLLM computes the log-probabilities of the prompt from."""
    engine = LLM(
        request.checkpoint,
        dtype=request.dtype,
        enforce_eager=True,
        max_model_len=len(request.tokens) + 1,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    computed: list[Tensor] = []

    def record(model: nn.Module) -> None:
        compute = model.compute_logits

        def recording(*args, **kwargs):
            computed.append(compute(*args, **kwargs))
            return computed[-1]

        model.compute_logits = recording

    engine.apply_model(record)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    engine.generate({"prompt_token_ids": request.tokens}, sampling, use_tqdm=False)
    del engine
    cleanup_dist_env_and_memory()
    # The other one is the single row that the next token is sampled from.
    return next(rows for rows in computed if len(rows) == len(request.tokens) - 1).float().clone()


if __name__ == "__main__":
    register()
    requested.answer(Path(sys.argv[1]), logits)
