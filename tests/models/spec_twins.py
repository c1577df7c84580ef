"""Twins on disk, folded by the rules of a spec: what the tests of specs share."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from nvfp4cli.check.compare import distance, fold, inputs, logits
from nvfp4cli.check.twin import Twin, load, twin
from nvfp4cli.models.claims import Claim, claim, described
from nvfp4cli.models.document import SPECS, read
from nvfp4cli.models.modules import matcher
from nvfp4cli.models.spec import load_for

EXACT = 1e-12  # exact folds give 1e-15
WRONG = 1e-3

Document = dict[str, Any]
Edit = Callable[[Document], None]


@dataclass(frozen=True)
class Source:
    """A twin on disk. given: the arguments of a forward pass. before: its logits."""

    folder: Path
    made: Twin
    given: dict[str, Any]
    before: Tensor

    def error(self, out: Path, rotate: str, spec: Path | None = None) -> float:
        """max |d logit| / max |logit| after a fold."""
        fold(self.folder, out, rotate, spec)
        return self.error_of(out)

    def error_of(self, out: Path) -> float:
        """The same for a fold that is there."""
        with torch.inference_mode():
            return distance(self.before, logits(load(out), self.given))

    def renamed(self, folder: Path) -> Path:
        """The twin with the tensors as its model class holds them."""
        self.made.model.save_pretrained(folder, save_original_format=False)
        (folder / "config.json").write_text(json.dumps(self.made.config), encoding="utf-8")
        return folder


def source(model_type: str, flags: dict[str, Any], folder: Path) -> Source:
    """A twin of what transformers makes of a model type and flags."""
    one = twin(AutoConfig.for_model(model_type, **flags).to_dict())
    one.write(folder)
    with torch.inference_mode():
        given = inputs(one.model)
        return Source(folder, one, given, logits(load(folder), given))


def shapes_of(folder: Path) -> dict[str, list[int]]:
    """Of every tensor of a checkpoint in one file."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def claims_of(shapes: dict[str, list[int]], config: dict[str, Any]) -> dict[str, Claim | None]:
    """What the tensors are; checked: each has one owner, and the shape that stands in its spec."""
    spec = load_for(config, shapes)
    language = spec.language(config)
    sizes = spec.sizes(language)
    found = claim(spec, shapes, language)
    assert found.keys() == shapes.keys()
    named = [
        module.pattern + suffix
        for module in described(spec.modules)
        for _, suffix in module.suffixes.parts()
    ]
    matchers = [matcher(pattern) for pattern in {*named, *spec.keep}]
    for name, one in found.items():
        assert sum(bool(m.fullmatch(name)) for m in matchers) == 1, name
        if one is not None and one.part == "weight" and one.spec.shape is not None:
            assert len(one.spec.shape) == len(shapes[name]), name
            assert all(map(sizes.fits, one.spec.shape, shapes[name])), name
    return found


def wrong(model_type: str, edit: Edit, path: Path) -> Path:
    """The spec of a model type with a fact of it changed."""
    document = read(SPECS / f"{model_type}.yaml")
    edit(document)
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def inner(*patterns: str) -> Edit:
    """Modules that no rotation touches."""

    def edit(document: Document) -> None:
        for pattern in patterns:
            module = document["modules"][pattern]
            kept = ("suffixes", "axes", "shape", "variant", "written_as", "bias", "optional")
            found = {key: module[key] for key in kept if key in module}
            document["modules"][pattern] = {"role": "inner", **found}

    return edit


def still(pattern: str) -> Edit:
    """The bias of a module stays as it is while the weight turns."""

    def edit(document: Document) -> None:
        module = document["modules"][pattern]
        module["suffixes"] = {"weight": ".weight", "bias": None}
        alone = {"role": "inner", "suffixes": {"weight": "", "bias": None}}
        kept = {key: module[key] for key in ("variant", "optional") if key in module}
        document["modules"][f"{pattern}.bias"] = alone | kept

    return edit


def changed(key: str, value: Any, pattern: str | None = None) -> Edit:
    """An entry of the spec, or of a module in it."""

    def edit(document: Document) -> None:
        owner = document if pattern is None else document["modules"][pattern]
        owner[key] = value

    return edit
