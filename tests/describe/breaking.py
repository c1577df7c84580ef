"""Damage to checkpoints, done with the safetensors library and not with the tool's own writer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None], **metadata: str) -> None:
    """Apply `change` to the tensors of model.safetensors; its __metadata__ is updated."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = {**(file.metadata() or {}), **metadata}
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata=header)


def replace(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change one tensor, which must be there."""
    rewrite(folder, lambda tensors: tensors.update({name: change(tensors[name].clone())}))


def remove(folder: Path, name: str) -> None:
    """Drop one tensor, which must be there."""
    rewrite(folder, lambda tensors: tensors.__delitem__(name))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")
