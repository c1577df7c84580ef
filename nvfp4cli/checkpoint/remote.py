"""A checkpoint on the hub by its headers alone, for plans that read no weights."""

from pathlib import Path

from huggingface_hub import is_offline_mode

from nvfp4cli.checkpoint import hub
from nvfp4cli.checkpoint.reader import DTYPES, Checkpoint, TensorInfo, read_json
from nvfp4cli.errors import CheckpointError


def reachable(model: str) -> bool:
    """True for a hub id, unless offline mode forbids asking the hub."""
    return hub.is_hub_id(model) and not is_offline_mode()


def open_remote(model: str, revision: str | None) -> Checkpoint:
    """config.json, sidecars and every safetensors header of a hub id; no weights are downloaded.

    The tensors of the result have shapes and sizes but cannot be read. Raises CheckpointError.
    """
    folder: Path = hub.resolve(model, revision, weights=False)
    tensors = {}
    files = hub.remote_headers(model, revision)
    for file, header in files.items():
        for name, (dtype, shape, (start, end)) in header.tensors.items():
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"{file} stores {name} as {dtype}, which this version cannot read: save the "
                    "checkpoint again with a current safetensors."
                )
            tensors[name] = TensorInfo(name, file, DTYPES[dtype], shape, start, end - start)
    metadata: dict[str, dict[str, str]] = {file: {} for file in files}
    return Checkpoint(folder, read_json(folder / "config.json"), tensors, metadata)
