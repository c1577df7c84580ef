"""A small random model of an architecture, from its config.json alone, in fp64."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from nvfp4cli.check.precision import float64
from nvfp4cli.check.shrink import configuration, shrink, unstated
from nvfp4cli.errors import CheckpointError, UnsupportedError

CONFIG = "config.json"

# The plain arithmetic: other implementations have no fp64, or another order of operations.
_PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}


@dataclass(frozen=True)
class Twin:
    """model: in eval mode, fp64. config: its config.json."""

    model: PreTrainedModel
    config: dict[str, Any]

    def write(self, folder: Path) -> None:
        """A checkpoint folder as the source's, with the names that transformers gives tensors."""
        self.model.save_pretrained(folder)
        text = json.dumps(self.config, indent=2) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")


def twin(config: dict[str, Any], seed: int = 0) -> Twin:
    """A twin of the model that `config`, a parsed config.json, describes.

    Every parameter is random, the same for the same seed: a gain that stayed 1, a bias that stayed
    0 or embeddings whose rows have mean 0 would hide a fault of a fold. Raises UnsupportedError
    and CheckpointError for what transformers cannot make.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it warns of what a twin's sizes imply
    model_class = _class(configuration(config))
    small = shrink(config)
    # This also imports every module of transformers that the model needs.
    with attempt(small["model_type"], unstated(config)), torch.device("meta"):
        _construct(model_class, small)
    with float64(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _construct(model_class, small)
        _randomize(model, seed)
    return Twin(model.eval().requires_grad_(False), small)


@contextmanager
def attempt(model_type: str, absent: Sequence[str] = ()) -> Iterator[None]:
    """Where transformers runs code of the model for the first time, at sizes of our choosing.

    absent: sizes that nothing states. Raises UnsupportedError for whatever that code raises.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "complete its config.json if it leaves something out"
        if absent:
            remedy = f"give {', '.join(absent)} in its config.json, as far as it needs them"
        raise UnsupportedError(
            f"transformers {transformers.__version__} cannot run a small {model_type} model "
            f"({reason}): {remedy}, otherwise compare the logits of the whole model before and "
            "after a fold."
        ) from error


def load(folder: Path) -> PreTrainedModel:
    """The model of a folder that a twin was written to or folded into, in fp64.

    Call it in the process that made the twin. Raises CheckpointError for tensors that do not fit:
    transformers by itself would fill them with random values.
    """
    model_class = _class(configuration(json.loads((folder / CONFIG).read_text("utf-8"))))
    with float64():
        model, report = model_class.from_pretrained(
            folder,
            dtype=torch.float64,
            ignore_mismatched_sizes=True,  # so that they are in the report
            output_loading_info=True,
            local_files_only=True,
            **_PLAIN,
        )
    faults = [f"{key} {sorted(map(str, names))[:3]}" for key, names in report.items() if names]
    if faults:
        raise CheckpointError(
            f"A twin does not fit its model any more ({', '.join(faults)}): correct the "
            "architecture spec that it was folded with."
        )
    return model.requires_grad_(False)


def _construct(model_class: type[PreTrainedModel], config: dict[str, Any]) -> PreTrainedModel:
    return model_class._from_config(configuration(config), dtype=torch.float64, **_PLAIN)


def _class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The wrapper with its vision tower, where there is one, or the causal language model."""
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise UnsupportedError(
        f"transformers {transformers.__version__} has no language model of the type "
        f"{config.model_type!r}: name a model that generates text."
    )


def _randomize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict()
    values = dict(model.named_parameters()) | {
        # Buffers that are trained all the same, such as a router's correction of its scores.
        name: buffer
        for name, buffer in model.named_buffers()
        if name in stored and name.endswith("bias") and buffer.is_floating_point()
    }
    with torch.no_grad():
        for name, value in sorted(values.items()):  # whatever the order of construction
            owner = model.get_submodule(name.rpartition(".")[0])
            value.copy_(_random(name, value, owner, generator))


def _random(name: str, initial: Tensor, owner: nn.Module, generator: torch.Generator) -> Tensor:
    noise = torch.randn(initial.shape, generator=generator, dtype=torch.float64)
    if name.endswith("bias") and not initial.any():
        return 0.2 * noise
    if isinstance(owner, nn.Embedding):
        return noise + 0.5 * torch.randn(len(noise), 1, generator=generator, dtype=torch.float64)
    if initial.ndim < 2 or "Norm" in type(owner).__name__:
        return initial + 0.3 * noise  # gains, sinks, A_log and the like have a place of their own
    return noise / initial.shape[-1] ** 0.5  # about keeps the variance of a unit-variance input
