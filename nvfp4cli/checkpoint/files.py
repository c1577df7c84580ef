"""Names of the files that a checkpoint consists of. No torch in here: `hub` reads it too."""

from collections.abc import Iterable
from pathlib import PurePosixPath

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RECORD = "nvfp4.yaml"  # how this tool made the checkpoint: recipe, rotation, version
CHANNELS = "nvfp4.channels"  # the factors by which channels were scaled, as safetensors

WEIGHT_SUFFIXES = frozenset(
    (
        ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack",
        ".npz", ".ot",
    )
)  # fmt: skip


def no_weights(model: str, names: Iterable[str]) -> str:
    """The sentence for a folder or repository with neither INDEX nor SINGLE among its files."""
    others = sorted(
        (name for name in names if PurePosixPath(name).suffix in WEIGHT_SUFFIXES),
        key=lambda name: (name.endswith(".safetensors"), name),
    )
    if any(name.startswith("pytorch_model") and name.endswith(".bin") for name in others):
        return (
            f"{model} has its weights as pytorch_model*.bin only: convert them with transformers, "
            f'AutoModelForCausalLM.from_pretrained("{model}").save_pretrained("converted") and '
            f'AutoTokenizer.from_pretrained("{model}").save_pretrained("converted"), '
            "and give that folder."
        )
    found = f"only {others[0]}" if others else "no weights at all"
    return (
        f"{model} has neither {SINGLE} nor {INDEX}, {found}: "
        "give a checkpoint saved by transformers."
    )
