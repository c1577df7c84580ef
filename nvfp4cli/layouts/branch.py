"""SVDQuant's low-rank branch as ModelOpt stores it beside a module of its own layout.

<m>.svdquant_lora_a, bf16 [r, K], meets the input first, <m>.svdquant_lora_b, bf16 [N, r], second
(modelopt/torch/export/unified_export_hf.py). ModelOpt also stores a pre_quant_scale for each input
channel, where this tool folds nothing and has none.
"""

from collections.abc import Mapping

from torch import Tensor, bfloat16

from nvfp4cli.checkpoint.reader import TensorInfo
from nvfp4cli.checkpoint.writer import Output
from nvfp4cli.formats.low_rank import LowRank
from nvfp4cli.layouts.record import Read, Shape

DOWN, UP = ".svdquant_lora_a", ".svdquant_lora_b"
HALVES = (DOWN, UP)
# vLLM refuses NVFP4_SVD, and no engine has code for the branch of a language model.
SERVE = "No engine serves SVDQuant yet: measure it with `nvfp4 eval {out} --ppl`"


def outputs(module: str, shape: Shape, rank: int) -> tuple[Output, ...]:
    """The tensors of a branch."""
    n, k = shape
    return (
        Output(module + DOWN, bfloat16, (rank, k)),
        Output(module + UP, bfloat16, (n, rank)),
    )


def export(module: str, branch: LowRank) -> dict[str, Tensor]:
    """Those tensors with their data."""
    return {module + DOWN: branch.down, module + UP: branch.up}


def rank(module: str, tensors: Mapping[str, TensorInfo]) -> int | None:
    """Of the branch that a module has, by its first half that is stored; None without any.

    Of a half that is no matrix it is some size or 0, so that the half is not what it should be.
    """
    if module + DOWN in tensors:
        return (*tensors[module + DOWN].shape, 0)[0]
    if module + UP in tensors:
        return (0, *tensors[module + UP].shape)[-1]
    return None


def load(module: str, read: Read) -> LowRank:
    """The branch of a module that has one."""
    return LowRank(read(module + DOWN), read(module + UP))
