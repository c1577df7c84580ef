"""Front door: the fastest encoder for where a tensor lies, always with the reference's bits."""

from torch import Tensor

from nvfp4cli.formats import nvfp4
from nvfp4cli.formats.nvfp4 import GlobalScale, Quantized

__all__ = ["amax", "quantize"]


def amax(weight: Tensor) -> float:
    """Largest magnitude of a matrix [N, K], where it lies; the value of `formats.nvfp4.amax`."""
    if weight.is_cuda:
        return nvfp4.amax(weight)
    from nvfp4cli.kernels.quantize_cpu import amax_cpu

    return amax_cpu(weight)


def quantize(weight: Tensor, scale: GlobalScale) -> Quantized:
    """Round a matrix to NVFP4 where it lies; the same bits as `formats.nvfp4.quantize`.

    weight: [N, K] bf16, fp16 or fp32, any strides, finite, K a multiple of 16.
    """
    if weight.is_cuda:
        # Triton is imported here only: it has no wheels outside Linux, and takes half a second.
        from nvfp4cli.kernels.quantize_triton import quantize_triton

        return quantize_triton(weight, scale)
    from nvfp4cli.kernels.quantize_cpu import quantize_cpu

    return quantize_cpu(weight, scale)
