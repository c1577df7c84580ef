"""Does a spec's fold keep the function? A twin's logits before and after, through the files."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nvfp4cli import pipeline
from nvfp4cli.check.inputs import inputs, sighted
from nvfp4cli.check.precision import float64
from nvfp4cli.check.shrink import unstated
from nvfp4cli.check.twin import attempt, load, twin
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.errors import UnsupportedError
from nvfp4cli.plan.quantize import plan_quantize
from nvfp4cli.recipe import Recipe

ROTATIONS = ("r1", "r2")
LIMIT = 1e-10  # exact folds give up to 1e-13, wrong ones 1e-2 or more


@dataclass(frozen=True)
class Verdict:
    """What became of one rotation.

    error: max |d logit| / max |logit|, None where the rotation was refused. reason: of the refusal.
    """

    rotation: str
    result: Literal["holds", "refused", "wrong"]
    error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """layers, parameters: of the twin. pictures: whether one was shown; None: it cannot see."""

    model_type: str
    layers: int
    parameters: int
    pictures: bool | None
    verdicts: tuple[Verdict, ...]


@torch.inference_mode()
def check(config: dict[str, Any], arch_spec: Path | None = None, *, seed: int = 0) -> Report:
    """Fold R1 and R2, each by itself, into a twin of the model that `config` describes.

    config: a parsed config.json. arch_spec: instead of the tool's own. The twin and its folds are
    written to a temporary folder and read back by transformers. Raises UnsupportedError where the
    spec does not fit the twin even without a rotation, and what `twin` raises.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        twin(config, seed).write(source)
        _plan(source, "none", arch_spec)
        model = load(source)
        with attempt(model.config.model_type, unstated(config)):
            given = inputs(model, seed)
            before = logits(model, given)
        verdicts = tuple(_verdict(source, name, arch_spec, given, before) for name in ROTATIONS)
    return Report(
        model_type=str(config["model_type"]),
        layers=int(model.config.get_text_config().num_hidden_layers),
        parameters=model.num_parameters(),
        pictures=sighted(model.config),
        verdicts=verdicts,
    )


def fold(source: Path, out: Path, rotate: str, arch_spec: Path | None = None) -> None:
    """Write the checkpoint `source` with a rotation folded in, as `nvfp4 quantize` does.

    Raises what planning and writing raise.
    """
    plan = _plan(source, rotate, arch_spec)
    for _ in pipeline.run(plan, out, device="cpu"):
        pass


def logits(model: PreTrainedModel, given: Mapping[str, Any]) -> Tensor:
    """fp64 [tokens, vocabulary]."""
    # The wrapper of transformers 5.24 fails after its language model has computed them.
    text_only = model.config.model_type == "llama4" and given.keys() == {"input_ids"}
    with float64():
        whole = model.language_model if text_only else model
        return whole(**given, use_cache=False).logits[0]


def distance(before: Tensor, after: Tensor) -> float:
    """max |d logit| / max |logit|."""
    return float((after - before).abs().max() / before.abs().max())


def _plan(source: Path, rotate: str, arch_spec: Path | None) -> pipeline.Plan:
    recipe = Recipe(scheme="none", rotate=rotate)
    checkpoint = open_checkpoint(source)
    return plan_quantize(checkpoint, recipe, model="twin", arch_spec=arch_spec, strict=True)


def _verdict(
    source: Path, rotation: str, arch_spec: Path | None, given: Mapping[str, Any], before: Tensor
) -> Verdict:
    out = source.with_name(rotation)
    try:
        fold(source, out, rotation, arch_spec)
    except UnsupportedError as refusal:
        return Verdict(rotation, "refused", reason=str(refusal))
    error = distance(before, logits(load(out), given))
    return Verdict(rotation, "holds" if error <= LIMIT else "wrong", error)  # wrong where it is NaN
