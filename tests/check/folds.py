"""Folded twins, and faults to put into them: what tools have been found to forget.

A fault is an edit of a folded checkpoint's tensors, or a spec that says something false. To control
another architecture, add a line to FAULTS.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from architectures import ALL, Case
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4cli.check import compare
from nvfp4cli.check.inputs import inputs
from nvfp4cli.check.twin import load, twin

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors, Tensors], None]  # (folded, source): changes `folded`


class Folded:
    """A case's twin and its folds in a folder, each made once."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.source = folder / "source"
        twin(case.config).write(self.source)
        model = load(self.source)
        self._given = inputs(model)
        self._before = compare.logits(model, self._given)
        self._folder = folder

    def fold(self, rotation: str) -> Path:
        """The folder of a fold with the tool's own spec."""
        out = self._folder / rotation
        if not out.exists():
            compare.fold(self.source, out, rotation)
        return out

    def error(self, folder: Path) -> float:
        """max |d logit| / max |logit| of a fold."""
        return compare.distance(self._before, compare.logits(load(folder), self._given))


def corrupt(folded: Path, source: Path, edit: Edit, out: Path) -> None:
    """Copy the folder `folded` to `out`, its tensors changed by `edit`."""
    tensors = load_file(folded / "model.safetensors")
    edit(tensors, load_file(source / "model.safetensors"))
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((folded / "config.json").read_bytes())


def left(*patterns: str) -> Edit:
    """Tensors that a fold should have changed and did not."""

    def edit(folded: Tensors, source: Tensors) -> None:
        for pattern in patterns:
            names = fnmatch.filter(folded, pattern)
            assert names, f"no tensor is called {pattern}: {sorted(folded)}"
            assert not all(torch.equal(folded[n], source[n]) for n in names), "nothing to leave"
            folded |= {name: source[name] for name in names}

    return edit


def centred(folded: Tensors, source: Tensors) -> None:
    """The rows of the embedding without their mean, which is right for LayerNorm only."""
    (name,) = fnmatch.filter(folded, "*embed_tokens.weight")
    rotation = torch.linalg.lstsq(source[name], folded[name]).solution
    folded[name] = (source[name] - source[name].mean(1, keepdim=True)) @ rotation


def tied(folded: Tensors, _: Tensors) -> None:
    """An output head that has the embedding's rotation and not the final norm's gain."""
    (name,) = fnmatch.filter(folded, "*embed_tokens.weight")
    folded["lm_head.weight"] = folded[name].clone()


def one_head(folded: Tensors, source: Tensors) -> None:
    """One R2 for all KV heads on the side of the values, and one for each on the other."""
    for name in fnmatch.filter(folded, "*v_proj.weight"):
        first, stored = (t[name].view(2, -1, t[name].shape[1]) for t in (folded, source))
        rotation = torch.linalg.lstsq(stored[0].T, first[0].T).solution  # W'^T = W^T R
        folded[name][len(first[0]) :] = (stored[1].T @ rotation).T


@dataclass(frozen=True)
class Fault:
    """edit: of the folded tensors. spec: what the spec is told instead of the truth."""

    case: Case
    rotation: str
    name: str
    edit: Edit | None = None
    spec: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """For people."""
        return f"{self.case.id}-{self.rotation}-{self.name}"

    def error(self, twins: Folded, folder: Path) -> float:
        """Of the fold with the fault, made in the new folder `folder`."""
        if self.edit is not None:
            corrupt(twins.fold(self.rotation), twins.source, self.edit, folder)
        else:
            compare.fold(twins.source, folder, self.rotation, self.write_spec(folder))
        return twins.error(folder)

    def write_spec(self, beside: Path) -> Path:
        """A file with the false spec, next to the folder `beside`."""
        path = beside.with_suffix(".yaml")
        name = self.case.model_type
        path.write_text(yaml.safe_dump({"model_type": name, "extends": name, **self.spec}))
        return path


_CASES = {case.id: case for case in ALL}


def fault(case: str, rotation: str, name: str, edit: Edit | None = None, **spec: Any) -> Fault:
    return Fault(_CASES[case], rotation, name, edit, spec)


FAULTS = (
    fault("llama", "r1", "centred embedding", centred),
    fault("llama-biases", "r1", "writer's bias", left("*.o_proj.bias")),
    fault("llama-biases", "r1", "down_proj's bias", left("*.down_proj.bias")),
    fault("llama-biases", "r1", "head without gain", tied),
    fault("llama-biases", "r2", "values' bias", left("*.v_proj.bias")),
    fault("qwen2-tied", "r2", "values' bias", left("*.v_proj.bias")),
    fault("qwen3", "r2", "one matrix for all heads", one_head),
    fault("mistral", "r1", "final norm folded twice", left("model.norm.weight")),
    fault("qwen2_moe", "r1", "router", left("*.mlp.gate.weight")),
    fault("qwen2_moe", "r1", "shared expert's gate", left("*.shared_expert_gate.weight")),
    fault("mixtral", "r1", "router", left("*.gate.weight")),
    fault("mixtral", "r1", "one expert", left("*.experts.3.w2.weight")),
    fault("deepseek_v3", "r1", "latent reader", left("*.kv_a_proj_with_mqa.weight")),
    fault("deepseek_v3", "r2", "values of the latent", left("*.kv_b_proj.weight")),
    fault("gpt_oss", "r1", "expert's bias", left("*.experts.down_proj_bias")),
    fault("gpt_oss", "r1", "router", left("*.router.weight")),
    fault("gemma", "r1", "1 + w read as w", norm_gain="plain"),
    fault("nemotron", "r1", "1 + w read as w", norm_gain="plain"),
    fault("cohere2", "r1", "LayerNorm taken for RMSNorm", norm_kind="rms"),
    fault("gpt2", "r1", "positions", left("*wpe.weight")),
    fault("opt", "r1", "a norm's bias", left("*.final_layer_norm.bias")),
    fault("lfm2", "r1", "convolution's reader", left("*.conv.in_proj.weight")),
    fault("falcon_h1", "r1", "state space's writer", left("*.mamba.out_proj.weight")),
    fault("llava", "r1", "projector's bias", left("*linear_2.bias")),
    fault("llava_next", "r1", "image_newline", left("*image_newline")),
    fault("qwen3_vl", "r1", "deepstack", left("*deepstack_merger_list.1.linear_fc2.bias")),
)  # fmt: skip
