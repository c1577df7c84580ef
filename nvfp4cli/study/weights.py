"""Errors on the linear weights of an unquantised checkpoint, read one at a time."""

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nvfp4cli.checkpoint.reader import Checkpoint, TensorInfo
from nvfp4cli.errors import RecipeError, UnsupportedError, UsageError, WeightError
from nvfp4cli.formats import nvfp4
from nvfp4cli.layouts import open_weights
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import recognize
from nvfp4cli.study.methods import METHODS, Method

BUDGET = 1 << 27  # values that are measured unless a limit is given: a minute on one core

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class WeightErrors:
    """Relative L2 errors of one weight by method's name, None where its rows do not fit.

    kind: the last part of the module's name, q_proj say. layer: its number, where it has one.
    """

    name: str
    kind: str
    layer: int | None
    shape: tuple[int, int]
    errors: dict[str, float | None]

    @property
    def best(self) -> str | None:
        """Name of the method with the smallest error, the first of equals; None if none fits."""
        found = {name: error for name, error in self.errors.items() if error is not None}
        return min(found, key=found.__getitem__, default=None)


def check_patterns(patterns: Iterable[str]) -> None:
    """Raise UsageError for what is no regular expression behind `re:`."""
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise UsageError(
                f"--tensors has {pattern!r}, which is no regular expression ({error}): mend it, "
                "or use * for any text."
            ) from None


def candidates(checkpoint: Checkpoint, model: str, patterns: Collection[str]) -> list[str]:
    """Names of the weights that can be studied, in the order of the layers.

    Without patterns these are the linear weights that `nvfp4 quantize` takes by default; with
    patterns, which name tensors or modules, all matrices of floats that one of them matches.

    Raises UnsupportedError for a quantised checkpoint, an unknown architecture, one without its
    linear weights or with one that is no matrix of floats, RecipeError for a pattern that matches
    nothing.
    """
    if checkpoint.config.get("quantization_config") or open_weights(checkpoint).layout:
        raise UnsupportedError(
            f"{model} is quantised already: study the unquantised model that it was made from."
        )
    tensors = checkpoint.tensors
    if not patterns:
        names = _linear(checkpoint)
        if not names:
            raise UnsupportedError(
                f"{model} holds none of the linear weights that its architecture has: name the "
                "weights to study with --tensors."
            )
        if odd := [name for name in names if not _is_matrix(tensors[name])]:
            info = tensors[odd[0]]
            dtype = str(info.dtype).removeprefix("torch.")
            raise UnsupportedError(
                f"{odd[0]} is {dtype} {list(info.shape)} and no matrix of floats: name the weights "
                "to study with --tensors."
            )
        return sorted(names, key=_place)
    matrices = sorted((n for n in tensors if _is_matrix(tensors[n])), key=_place)
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in matrices if _matches(pattern, name)}
        if not matched:
            example = f" such as {matrices[-1]!r}" if matrices else ""
            raise RecipeError(
                f"--tensors {pattern!r} matches no matrix of {model}: name one{example}, * "
                "standing for any text."
            )
        found |= matched
    return [name for name in matrices if name in found]


def spread(names: Sequence[str], checkpoint: Checkpoint, limit: int | None) -> list[str]:
    """As many names of each kind as `limit` says, evenly over the layers; the order is kept.

    limit: None for as many as BUDGET allows, at least one of each kind.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    if limit is None:
        mean_sizes = (
            sum(checkpoint.tensors[name].numel for name in members) / len(members)
            for members in kinds.values()
        )
        limit = max(1, int(BUDGET / max(1, sum(mean_sizes))))
    chosen = {name for members in kinds.values() for name in _evenly(members, limit)}
    return [name for name in names if name in chosen]


def measure(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[WeightErrors]:
    """Each weight under every method, with a scale of its own even where engines fuse several.

    Raises WeightError for a weight that is not finite.
    """
    for name in names:
        weight = checkpoint.read(name)
        if not math.isfinite(nvfp4.amax(weight)):
            raise WeightError(
                f"{name} holds values that are NaN or Inf: repair the checkpoint, or name other "
                "weights with --tensors."
            )
        n, k = weight.shape
        errors = {m.name: m.relative_error(weight) if m.fits(k) else None for m in METHODS}
        number = re.search(r"\.(\d+)\.", name)
        layer = int(number[1]) if number else None
        yield WeightErrors(name, kind_of(name), layer, (n, k), errors)


def kind_of(name: str) -> str:
    """The last part of the module's name."""
    return name.removesuffix(".weight").rpartition(".")[2]


def mean_errors(weights: Sequence[WeightErrors]) -> dict[str, float | None]:
    """Mean over the weights by method's name, None where one of them does not fit.

    A mean over other weights than the neighbouring methods' could not be compared with theirs.
    """
    found: dict[str, float | None] = {}
    for method in METHODS:
        errors = [e for w in weights if (e := w.errors[method.name]) is not None]
        complete = errors and len(errors) == len(weights)
        found[method.name] = sum(errors) / len(errors) if complete else None
    return found


def best_counts(weights: Iterable[WeightErrors]) -> dict[str, int]:
    """Of how many weights each method is the best, by method's name."""
    best = [weight.best for weight in weights]
    return {method.name: best.count(method.name) for method in METHODS}


def improved(weights: Iterable[WeightErrors], method: Method, plain: Method) -> tuple[int, int]:
    """In how many weights `method` errs less than `plain`, and how many both fit."""
    pairs = [(w.errors[method.name], w.errors[plain.name]) for w in weights]
    lower = [a < b for a, b in pairs if a is not None and b is not None]
    return sum(lower), len(lower)


def _linear(checkpoint: Checkpoint) -> list[str]:
    """The weights that the architecture's spec calls linear and quantises by default."""
    model_type = str(checkpoint.config.get("model_type"))
    path = specs.beside(checkpoint.folder, model_type)
    if path is None:
        raise UnsupportedError(
            f"No architecture spec for model_type {model_type!r} says which weights are linear: "
            "name them with --tensors, '*proj.weight' for example."
        )
    spec = specs.load_for(checkpoint.config, checkpoint.tensors.keys(), path)
    claims, _ = recognize(spec, checkpoint.tensors)
    return [
        claim.tensor
        for claim in claims.values()
        if claim and claim.part == "weight" and claim.spec.quantizable and claim.spec.quantize
    ]


def _is_matrix(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and info.numel > 0 and info.dtype in _FLOATS


def _matches(pattern: str, name: str) -> bool:
    """Whether a shell pattern, or a regular expression behind `re:`, names tensor or module."""
    names = (name, name.removesuffix(".weight"))
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], n) for n in names)
    return any(fnmatch.fnmatchcase(n, pattern) for n in names)


def _place(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in name.split(".")]


def _evenly(names: Sequence[str], count: int) -> list[str]:
    """The first, the last and what lies evenly between; of one the middle."""
    last = len(names) - 1
    if count > last:
        return list(names)
    if count == 1:
        return [names[len(names) // 2]]
    return [names[round(i * last / (count - 1))] for i in range(count)]
