"""Inputs that are scaled channel by channel, and what makes them divided: the function stays.

In fp64 a right scaling is exact to 1e-14; a wrong one, by factors from 0.5 to 2, shows at once.
"""

from collections.abc import Sequence
from pathlib import Path

import architectures
import pytest
import torch
from architectures import Case
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli.check import compare
from nvfp4cli.check.inputs import inputs
from nvfp4cli.check.twin import load, twin
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.models import claims, pieces, spec
from nvfp4cli.models.scaling import Scaling, scalings
from nvfp4cli.rotate import fold
from nvfp4cli.rotate.channels import edits

# What makes the input of each linear module that has one to scale: n, a norm; v, values; g, a gate.
KINDS = {
    "llama": {"q_proj": "n", "k_proj": "n", "v_proj": "n", "o_proj": "v",
              "gate_proj": "n", "up_proj": "n", "down_proj": "g"},
    "nemotron": {"q_proj": "n", "k_proj": "n", "v_proj": "n", "o_proj": "v", "up_proj": "n"},
    "gpt2": {"c_attn": "n", "attn.c_proj": "v", "c_fc": "n"},
    "phi3": {"qkv_proj": "n", "o_proj": "v", "gate_up_proj": "n"},
    "mixtral": {"q_proj": "n", "k_proj": "n", "v_proj": "n", "o_proj": "v", "gate": "n",
                "w1": "n", "w3": "n", "w2": "g"},
    "deepseek_v3": {"q_a_proj": "n", "kv_a_proj_with_mqa": "n", "o_proj": "v", "gate": "n",
                    "gate_proj": "n", "up_proj": "n", "down_proj": "g"},
    "olmo2": {"o_proj": "v", "down_proj": "g"},
    "qwen3_next": {"q_proj": "n", "k_proj": "n", "v_proj": "n", "in_proj_qkvz": "n",
                   "in_proj_ba": "n", "gate": "n", "shared_expert_gate": "n",
                   "gate_proj": "n", "up_proj": "n", "down_proj": "g"},
}  # fmt: skip


def found(folder: Path) -> list[Scaling]:
    checkpoint = open_checkpoint(folder)
    names = list(checkpoint.tensors)
    own = spec.load_for(checkpoint.config, names)
    config = own.language(checkpoint.config)
    claimed = claims.claim(own, names, config)
    return list(scalings(own, claimed.values(), own.sizes(config)))


def factors(one: Scaling, tensors: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    claim = one.consumers[0]
    width = tensors[claim.tensor].shape[-2 if pieces.transposed(claim) else -1]
    channels = None if one.channels is None else torch.tensor(one.channels)
    size = width if channels is None else int(channels.max()) + 1
    drawn = 2 ** (2 * torch.rand(size, generator=generator) - 1)
    return drawn if channels is None else drawn[channels]


def changed(
    source: Path, out: Path, wanted: Sequence[Scaling], forgotten: Sequence[str] = ()
) -> Path:
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    drawn = {one.name: factors(one, tensors, generator) for one in wanted}
    assert len(drawn) == len(wanted)
    claimed = {c.tensor: c for one in wanted for c in (*one.consumers, *one.producers)}
    for name, changes in edits(wanted, drawn).items():
        if name in forgotten:
            continue
        turned = pieces.transposed(claimed[name])
        found = fold.apply(tensors[name], changes, tensors.__getitem__, transposed=turned)
        tensors[name] = found.contiguous()
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    return out


@pytest.mark.parametrize("case", architectures.ALL, ids=lambda case: case.id)
@torch.inference_mode()
def test_scaling_keeps_the_function(case: Case, tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin(case.config).write(source)
    model = load(source)
    given = inputs(model)
    before = compare.logits(model, given)
    wanted = found(source)
    assert wanted
    after = compare.logits(load(changed(source, tmp_path / "out", wanted)), given)
    assert compare.distance(before, after) <= 1e-12


@pytest.mark.parametrize("model_type", KINDS)
def test_what_can_be_scaled(model_type: str, tmp_path: Path) -> None:
    case = next(c for c in architectures.TEXT if c.model_type == model_type)
    twin(case.config).write(tmp_path / "source")
    kinds: dict[str, str] = {}
    for one in found(tmp_path / "source"):
        role = one.producers[0].spec.role
        kind = "n" if role == "norm" else "v" if one.channels else "g"
        for claim in one.consumers:
            names = claim.module.split(".")
            name = ".".join(names[-2:]) if names[-1] == "c_proj" else names[-1]
            assert kinds.setdefault(name, kind) == kind
    assert kinds == KINDS[model_type]


@torch.inference_mode()
def test_a_scaling_that_is_forgotten_shows(tmp_path: Path) -> None:
    source = tmp_path / "source"
    twin(architectures.TEXT[0].config).write(source)
    model = load(source)
    given = inputs(model)
    before = compare.logits(model, given)
    for number, one in enumerate(found(source)[:6]):
        producers = [claim.tensor for claim in one.producers]
        half = changed(source, tmp_path / str(number), [one], forgotten=producers)
        after = compare.logits(load(half), given)
        assert compare.distance(before, after) > 1e-3
