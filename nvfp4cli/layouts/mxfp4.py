"""MXFP4 weights read as float: E2M1 codes, one power of two for each 32 of a row.

gpt-oss: `<p>_blocks` [E, out, in/32, 16] and `<p>_scales` [E, out, in/32] stand for the parameter
`<p>` [E, in, out] (transformers/integrations/mxfp4.py, `convert_moe_packed_tensors`).
compressed-tensors' mxfp4-pack-quantized: `<m>.weight_packed` [N, K/2] and `<m>.weight_scale`
[N, K/32] stand for `<m>.weight` (compressors/mxfp4/base.py). In both the even element is in the
low nibble and the scale byte is the exponent + 127.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4cli.errors import CheckpointError, WeightError
from nvfp4cli.formats import mxfp4

_BLOCKS, _SCALES = "_blocks", "_scales"
_PACKED, _SCALE = ".weight_packed", ".weight_scale"
_BYTES = frozenset((torch.uint8, torch.float8_e8m0fnu))
_LABEL = "MXFP4"


@dataclass(frozen=True)
class Mxfp4:
    """Codes and scale bytes of a matrix [N, K], or of one [in, out] for each expert."""

    codes: TensorInfo
    scale: TensorInfo
    shape: tuple[int, ...]
    label: str = _LABEL

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return self.codes.name, self.scale.name

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """fp32 rows or experts [start, stop): code * 2^e, exact.

        Experts are a transposed view, so that a reader of [out, in] transposes at no cost. Raises
        WeightError for a scale that is NaN.
        """
        scale = checkpoint.read_rows(self.scale.name, start, stop).view(torch.uint8)
        self._check(scale)
        codes = checkpoint.read_rows(self.codes.name, start, stop)
        blocks = scale.shape[-1]  # of a row
        values = mxfp4.dequantize(
            mxfp4.Quantized(codes.reshape(-1, blocks * mxfp4.BLOCK // 2), scale.reshape(-1, blocks))
        )
        if len(self.shape) == 2:
            return values
        return values.view(stop - start, self.shape[2], self.shape[1]).mT

    def _check(self, scale: Tensor) -> None:
        bad = int((scale == mxfp4.NAN_BYTE).sum())
        if bad:
            raise WeightError(
                f"{self.scale.name} in {self.scale.file} holds {bad} "
                f"scale{'s' if bad > 1 else ''} that {'are' if bad > 1 else 'is'} NaN: download "
                "the checkpoint again, or start from the unquantised model."
            )


def encodings(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Mxfp4]]:
    """The MXFP4 tensors under their unquantised names.

    tensors: what no other layout has claimed; there a weight_packed of bytes is MXFP4. Raises
    CheckpointError where the scale is missing or one of the two has another dtype or shape.
    """
    for name, codes in tensors.items():
        if name.endswith(_BLOCKS) and codes.dtype == torch.uint8:
            base = name.removesuffix(_BLOCKS)
            scale = _partner(codes, base + _SCALES, tensors)
            yield base, Mxfp4(codes, scale, _experts_shape(codes, scale))
        elif name.endswith(_PACKED) and codes.dtype == torch.uint8:
            module = name.removesuffix(_PACKED)
            scale = _partner(codes, module + _SCALE, tensors)
            yield f"{module}.weight", Mxfp4(codes, scale, _matrix_shape(codes, scale))


def _partner(codes: TensorInfo, name: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo:
    if name not in tensors:
        raise CheckpointError(
            f"{codes.name} in {codes.file} has no {name} beside it: download the checkpoint "
            "again, or start from the unquantised model."
        )
    return tensors[name]


def _experts_shape(codes: TensorInfo, scale: TensorInfo) -> tuple[int, ...]:
    whole = (*scale.shape, mxfp4.BLOCK // 2)
    if len(scale.shape) != 3 or codes.shape != whole or scale.dtype not in _BYTES:
        raise _misshapen(codes, scale, "[experts, rows, blocks, 16]", "[experts, rows, blocks]")
    experts, rows, blocks = scale.shape
    return experts, blocks * mxfp4.BLOCK, rows


def _matrix_shape(codes: TensorInfo, scale: TensorInfo) -> tuple[int, ...]:
    fits = len(scale.shape) == 2 and scale.dtype in _BYTES
    if not fits or codes.shape != (scale.shape[0], scale.shape[1] * mxfp4.BLOCK // 2):
        raise _misshapen(codes, scale, "[rows, 16 * blocks]", "[rows, blocks]")
    return scale.shape[0], scale.shape[1] * mxfp4.BLOCK


def _misshapen(
    codes: TensorInfo, scale: TensorInfo, codes_form: str, scale_form: str
) -> CheckpointError:
    return CheckpointError(
        f"{codes.name} {list(codes.shape)} and {scale.name} {list(scale.shape)} "
        f"({str(scale.dtype).removeprefix('torch.')}) are no MXFP4 weight, {codes_form} and bytes "
        f"{scale_form}: download the checkpoint again, or start from the unquantised model."
    )
