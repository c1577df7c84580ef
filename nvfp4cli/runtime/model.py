"""A checkpoint of any layout as a transformers model, to be measured."""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nvfp4cli.checkpoint.reader import Checkpoint, open_checkpoint
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.layouts.sources import Source, open_source
from nvfp4cli.models import pieces
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import Claim, recognize

_NAMED = 3  # tensors an error message names before it only counts


def load(folder: Path, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The causal language model of a checkpoint, unquantised or in any of our layouts.

    NVFP4 weights are dequantised to fp32 and rounded to `dtype`; activations are not quantised.
    Tensors that the architecture keeps in fp32 stay so. The model is in eval mode without
    gradients. Memory: one copy of the model on `device` and a few tensors in fp32.

    transformers does the loading, so its renamings and fusions of tensors (per-expert matrices to
    one 3-D parameter, say) and its tying of weights are those every user of the model gets. No
    remote code runs and nothing is downloaded.

    Raises CheckpointError naming tensors that are missing, unexpected or of the wrong shape: by
    itself transformers would fill them with random values. Raises UnsupportedError for a model
    type that the installed transformers does not know as a causal language model.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # the faults it reports are raised below
    checkpoint = open_checkpoint(folder)
    config, model_class = _architecture(folder, checkpoint.config)
    lock = threading.Lock()
    try:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict={name: LazyTensor(read, lock) for name, read in _tensors(checkpoint)},
            dtype=dtype,
            device_map={"": device},
            ignore_mismatched_sizes=True,  # so that they are in the report, with their names
            output_loading_info=True,
        )
    except RuntimeError as error:
        # What transformers raises after it has logged why tensors could not be fused.
        if "conversion of the weights" not in str(error):
            raise
        raise CheckpointError(
            f"Tensors of {folder} do not fit together as the model's fused weights (listed "
            "above): restore the checkpoint, or quantise the source again."
        ) from error
    _check(folder, report)
    return model.requires_grad_(False)


def configuration(folder: Path) -> PreTrainedConfig:
    """The configuration of the model that `load` makes. Raises what `load` raises for it."""
    return _architecture(folder, open_checkpoint(folder).config)[0]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. Raises CheckpointError if it has none that works."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(_no_tokenizer(folder)) from error
    # Without its vocabulary file a tokenizer class may load all the same, with no token for text or
    # with the unknown one alone.
    found = tokenizer("x", add_special_tokens=False).input_ids
    if set(found) <= {tokenizer.unk_token_id}:
        raise CheckpointError(_no_tokenizer(folder))
    return tokenizer


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The model's tensors and how each is read.

    Experts that are stored apart for engines, while the architecture has them in one tensor, are
    put together again.
    """
    source = open_source(checkpoint)
    path = specs.beside(checkpoint.folder, checkpoint.config.get("model_type"))
    together: dict[str, list[list[str]]] = {}
    claims: dict[str, Claim | None] = {}
    if path is not None:
        spec = specs.load_for(checkpoint.config, source.tensors.keys(), path)
        together = pieces.joined(spec, source.tensors)
        claims, _ = recognize(spec, [*source.tensors, *together])
    apart = {name for experts in together.values() for parts in experts for name in parts}
    for name in source.tensors.keys() - apart:
        claim = claims.get(name)
        # Codes are of [out, in] whatever the model has.
        turned = claim is not None and pieces.transposed(claim) and not claim.spec.per_expert
        if turned and not source.tensors[name].stored:
            yield name, partial(_turned, source, name)
        else:
            yield name, partial(source.read, name)
    for name, experts in together.items():
        claim = claims[name]
        assert claim is not None
        yield name, partial(_together, source, claim, experts)


def _turned(source: Source, name: str) -> Tensor:
    return source.read(name).T


def _together(source: Source, claim: Claim, experts: list[list[str]]) -> Tensor:
    return pieces.join(claim, ([source.read(name) for name in parts] for parts in experts))


class LazyTensor:
    """A tensor that is read when transformers materialises it, as a safetensors slice would be.

    transformers materialises from several threads; the lock keeps them to one dequantised tensor
    at a time.
    """

    def __init__(self, read: Callable[[], Tensor], lock: threading.Lock) -> None:
        self._read = read
        self._lock = lock

    def __getitem__(self, _: EllipsisType) -> Tensor:
        with self._lock:
            return self._read()


def _architecture(
    folder: Path, values: dict[str, Any]
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The configuration of the unquantised model, and its class.

    AutoModelForCausalLM chooses the same class but takes no weights from memory.
    """
    config = configured(values, str(folder / "config.json"))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(
            f"{folder} holds a {config.model_type} model, which is not a causal language model: "
            "perplexity is not defined for it; name another checkpoint."
        )
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Of some multimodal models this is the language model alone, made from its own part.
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    return config, model_class


def configured(values: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """The configuration of the unquantised model of a parsed config.json; name: for messages.

    Raises UnsupportedError for a model type that transformers does not know, CheckpointError for
    values that it refuses.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"transformers {transformers.__version__} does not know the model type "
            f"{model_type!r} of {name}: install a release that does."
        )
    # The weights arrive dequantised: no quantiser of transformers may touch them.
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(_decoded(plain))
    except Exception as error:  # its checks raise whatever they like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"transformers refuses {name} ({reason}): correct it.") from error
    return config


def _decoded(value: Any) -> Any:
    """Numbers that JSON cannot hold, as transformers writes them: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(one) for key, one in value.items()}
    return [_decoded(one) for one in value] if isinstance(value, list) else value


def _check(folder: Path, report: dict[str, Any]) -> None:
    wrong_shape = [
        f"{name} ({list(stored)} instead of {list(wanted)})"
        for name, stored, wanted in report["mismatched_keys"]
    ]
    faults = {
        "lacks": list(report["missing_keys"]),
        "holds, unknown to the model,": list(report["unexpected_keys"]),
        "has in a wrong shape": wrong_shape,
    }
    found = [f"{verb} {_some(names)}" for verb, names in faults.items() if names]
    if found:
        raise CheckpointError(
            f"{folder} {' and '.join(found)}: compare it with its config.json, then restore it or "
            "quantise the source again."
        )


def _some(names: list[str]) -> str:
    first = ", ".join(sorted(names)[:_NAMED])
    more = len(names) - _NAMED
    return f"{first} and {more} more" if more > 0 else first


def _no_tokenizer(folder: Path) -> str:
    return (
        f"{folder} holds no tokenizer that transformers {transformers.__version__} can load: copy "
        "the tokenizer files of the source model into it."
    )
