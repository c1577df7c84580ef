"""A checkpoint as the unquantised model it stands for.

What is quantised already, FP8, MXFP4 or NVFP4, is read as float with its scales, piece by piece;
the scales disappear from the names. Nothing is guessed: a tensor that is part of a quantisation
which this version does not know stops the run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.layouts import StoredWeights, fp8, mxfp4, open_weights
from nvfp4cli.layouts.declared import declared

# Scales of activations and KV caches, on which no weight depends, and ComfyUI's marker.
_AUXILIARY = re.compile(
    r"\.(input_scale|input_global_scale|input_scale_ub|activation_scale|output_scale|prob_scale"
    r"|[qkv]_scale|kv_scale|(input|[qkv])_zero_point|comfy_quant)$|_proj_(input|activation)_scale$"
)
# Last part of a tensor's name -> the quantisation that it is part of.
_UNREADABLE = {
    "qweight": "GPTQ or AWQ",
    "weight_shape": "packed integers",
    "weight_zero_point": "zero points",
    "pre_quant_scale": "AWQ",
    "svdquant_lora_a": "SVDQuant",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
}
# What follows a weight's name in the name of its scale.
_WEIGHT_SCALE = re.compile(r"_scale_inv$|(?<=weight)(_scale|_scale_2|_global_scale)$")
_INTEGERS = frozenset((torch.int8, torch.uint8))
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Encoding(Protocol):
    """How a float tensor is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the float tensor."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the stored tensors."""

    @property
    def label(self) -> str:
        """A short name for people."""

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """fp32 [start, stop) along the first axis."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the unquantised model.

    dtype: what its values stand for; a dequantised one is read as fp32 whatever this is. nbytes:
    on disk, with its scales. parts: names of the stored tensors it is made from. encoding: None
    where those are the file's own bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    parts: tuple[str, ...]
    encoding: Encoding | None

    @property
    def stored(self) -> bool:
        """True where the tensor is in the file as it is."""
        return self.encoding is None


@dataclass(frozen=True)
class Source:
    """A checkpoint under the unquantised model's names.

    tensors: in name order. auxiliary: names of the scales of activations and KV caches, which are
    not read. quantization: a short name for people, None where nothing is quantised.
    drop_config_keys: paths in config.json that do not hold for the float model.
    """

    checkpoint: Checkpoint
    tensors: dict[str, SourceTensor]
    auxiliary: tuple[str, ...]
    quantization: str | None
    drop_config_keys: tuple[tuple[str, ...], ...]

    def read(self, name: str) -> Tensor:
        """A whole tensor: fp32 where it is dequantised, otherwise as stored.

        Raises WeightError where a scale is no usable number; so do the other readers.
        """
        tensor = self.tensors[name]
        if tensor.encoding is None:
            return self.checkpoint.read(name)
        if len(tensor.shape) == 2:
            return self.read_rows(name, 0, tensor.shape[0])
        values = torch.empty(tensor.shape, dtype=torch.float32)
        for i in range(tensor.shape[0]):  # decoding takes several times the memory of its result
            values[i] = self.read_index(name, i)
        return values

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """[start, stop) along the first axis, reading no more than these rows and their scales.

        Of an NVFP4 weight the whole is read, at 4.5 bits a value, since scales may be swizzled.
        """
        encoding = self.tensors[name].encoding
        if encoding is None:
            return self.checkpoint.read_rows(name, start, stop)
        return encoding.read(self.checkpoint, start, stop)

    def read_index(self, name: str, i: int) -> Tensor:
        """The i-th slice along the first axis, such as one expert; it need not be contiguous."""
        return self.read_rows(name, i, i + 1)[0]


def open_source(checkpoint: Checkpoint) -> Source:
    """See a checkpoint as the unquantised model it stands for, from headers alone.

    Raises UnsupportedError for a quantisation that cannot be read as float, and CheckpointError
    for an FP8 tensor without its scale, or one whose scale does not fit.
    """
    declaration = declared(checkpoint)
    weights = open_weights(checkpoint)
    left = dict(sorted(checkpoint.tensors.items()))
    encodings: dict[str, Encoding] = {}

    def claim(name: str, encoding: Encoding) -> None:
        if name in encodings or (name in checkpoint.tensors and name not in encoding.parts):
            raise CheckpointError(
                f"{name} is stored twice, once as {' and '.join(encoding.parts)}: remove the one "
                "that is wrong."
            )
        encodings[name] = encoding
        for part in encoding.parts:
            del left[part]

    for module in weights.quantized:
        weights.check_parts(module, activations=False)
        claim(f"{module}.weight", _Nvfp4(weights, module))
    _check_readable(left.values())
    for name, packed in list(mxfp4.encodings(left)):
        claim(name, packed)
    for name, info in list(left.items()):
        if info.dtype in fp8.DTYPES:
            claim(name, fp8.encoding(info, left, declaration.block))
    quantized = bool(encodings or declaration.keys)
    auxiliary = [name for name in left if quantized and _AUXILIARY.search(name)]
    for name in auxiliary:
        del left[name]
    _check_plain(left, checkpoint.tensors)
    return Source(
        checkpoint,
        dict(sorted(_tensors(checkpoint, encodings, left))),
        tuple(name for name in auxiliary if not name.endswith(".comfy_quant")),
        " + ".join(sorted({encoding.label for encoding in encodings.values()})) or None,
        declaration.keys,
    )


def _check_readable(infos: Iterable[TensorInfo]) -> None:
    for info in infos:
        kind = _UNREADABLE.get(info.name.rpartition(".")[2])
        if kind:
            raise UnsupportedError(
                f"{info.name} in {info.file} is part of a weight quantised with {kind}, which "
                "cannot be read as float: start from the unquantised model."
            )


def _check_plain(plain: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise for what no encoding has claimed and no float model has."""
    for name, info in plain.items():
        if info.dtype == torch.float8_e8m0fnu or _WEIGHT_SCALE.search(name):
            base = _WEIGHT_SCALE.sub("", name)
            weight = tensors.get(base) if base != name else None
            beside = f"beside {weight.name}, {_dtype_name(weight)}" if weight else "alone"
            raise CheckpointError(
                f"{name} in {info.file} is a scale and stands {beside}, so it is not known what "
                "it scales: remove it if the weights are float, or start from the unquantised "
                "model."
            )
        # Old checkpoints keep causal masks as bytes, under a name that packed weights never have.
        if info.dtype in _INTEGERS and len(info.shape) > 1 and not name.endswith(".bias"):
            raise UnsupportedError(
                f"{name} in {info.file} is {_dtype_name(info)} {list(info.shape)}, integers that "
                "cannot be read as float weights: start from the unquantised model."
            )


def _dtype_name(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Nvfp4:
    """A module of one of the NVFP4 layouts."""

    weights: StoredWeights
    module: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.quantized[self.module]

    @property
    def parts(self) -> tuple[str, ...]:
        return self.weights.part_names(self.module)

    @property
    def label(self) -> str:
        assert self.weights.layout is not None
        return f"NVFP4, {self.weights.layout.NAME}"

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        return self.weights.rows(self.module, start, stop)


def _tensors(
    checkpoint: Checkpoint, encodings: Mapping[str, Encoding], plain: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, SourceTensor]]:
    dtype = _float_dtype(checkpoint.config)
    for name, encoding in encodings.items():
        nbytes = sum(checkpoint.tensors[part].nbytes for part in encoding.parts)
        yield name, SourceTensor(name, dtype, encoding.shape, nbytes, encoding.parts, encoding)
    for name, info in plain.items():
        yield name, SourceTensor(name, info.dtype, info.shape, info.nbytes, (name,), None)


def _float_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that config.json says the model computes in, bf16 where it is silent."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(level.get(key)).removeprefix("torch.")
            if name in _DTYPES:
                return _DTYPES[name]
    return torch.bfloat16
