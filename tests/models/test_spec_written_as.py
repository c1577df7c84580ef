"""Modules that transformers renames get the names that engines know where experts are quantised."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import quantize
from safetensors.torch import load_file
from spec_twins import Source, claims_of, shapes_of, source

from nvfp4cli.check.compare import distance
from nvfp4cli.cli.app import main
from nvfp4cli.models.claims import as_written
from nvfp4cli.runtime.model import load

BLOCK = "model.layers.0.block_sparse_moe"
# What is renamed in layer 0: name of transformers 5 -> name of the model's own files.
RENAMED = {
    "mixtral": {"model.layers.0.mlp.gate.weight": f"{BLOCK}.gate.weight"},
    "minimax_m2": {
        "model.layers.0.mlp.gate.weight": f"{BLOCK}.gate.weight",
        "model.layers.0.mlp.e_score_correction_bias": f"{BLOCK}.e_score_correction_bias",
    },
    "granitemoe": {f"{BLOCK}.router.weight": f"{BLOCK}.router.layer.weight"},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Source, Path]]:
    """A twin in the model's own names, and in those of transformers 5."""
    twins: dict[str, tuple[Source, Path]] = {}

    def make(model_type: str) -> tuple[Source, Path]:
        if model_type not in twins:
            folder = tmp_path_factory.mktemp(model_type)
            twin = source(model_type, {}, folder / "original")
            twins[model_type] = twin, twin.renamed(folder / "renamed")
        if not RENAMED[model_type].keys() <= shapes_of(twins[model_type][1]).keys():
            pytest.skip("transformers 5.0 saves this type in the names of the hub")
        return twins[model_type]

    return make


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tensors under the same names."""
    tensors, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    return tensors.keys() == others.keys() and all(
        torch.equal(tensor.flatten().view(torch.uint8), others[name].flatten().view(torch.uint8))
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("model_type", RENAMED)
@pytest.mark.parametrize("options", [(), ("--rotate", "r1r2")])
def test_quantised_files_do_not_depend_on_the_names_of_the_source(
    model_type, options, made, tmp_path
):
    twin, renamed = made(model_type)
    options = ("--layout", "compressed-tensors", *options)
    outs = tmp_path / "original", tmp_path / "renamed"
    for folder, out in zip((twin.folder, renamed), outs, strict=True):
        assert quantize(folder, out, *options) == 0
        assert main(["inspect", str(out), "--strict", "--against", str(folder)]) == 0
    assert same(*outs)
    ignored = [json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
               for out in outs]  # fmt: skip
    assert sorted(ignored[0]) == sorted(ignored[1])


@pytest.mark.parametrize("model_type", RENAMED)
def test_what_is_not_quantised_keeps_its_names(model_type, made, tmp_path):
    _, renamed = made(model_type)
    assert quantize(renamed, tmp_path / "out", "--scheme", "none", "--rotate", "r1") == 0
    assert shapes_of(tmp_path / "out").keys() == shapes_of(renamed).keys() | {"lm_head.weight"}


@pytest.mark.parametrize("model_type", RENAMED)
def test_names_are_exchanged_as_a_whole(model_type, made):
    twin, renamed = made(model_type)
    names = RENAMED[model_type]
    found = as_written(claims_of(shapes_of(renamed), twin.made.config))
    assert {one.source: name for name, one in found.items()
            if one and one.source and one.layer == 0} == names  # fmt: skip
    original = claims_of(shapes_of(twin.folder), twin.made.config)
    for name in names.values():
        one, other = found[name], original[name]
        assert one is not None and other is not None
        assert (one.tensor, one.module, one.spec.role) == (name, other.module, other.spec.role)
    assert as_written(original) == original


@pytest.mark.parametrize("model_type", RENAMED)
def test_it_is_converted_and_run(model_type, made, tmp_path):
    """With a layer whose experts stay together, beside a router of the other name."""
    _, renamed = made(model_type)
    out, converted = tmp_path / "out", tmp_path / "converted"
    assert quantize(renamed, out, "--layout", "modelopt", "--keep-first", "1") == 0
    assert main(["inspect", str(out), "--strict", "--against", str(renamed)]) == 0
    assert main(["convert", str(out), str(converted), "--layout", "compressed-tensors"]) == 0
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        before, after, again = (
            load(folder, dtype=torch.float32, device="cpu")(input_ids=ids, use_cache=False).logits
            for folder in (renamed, out, converted)
        )
    # Not bit for bit: the memory of a loaded tensor may be aligned otherwise.
    assert distance(after, again) < 2e-6
    assert 0 < distance(before, after) < 0.5
