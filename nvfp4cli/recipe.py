"""A recipe: what the user wishes, as a flat YAML file or as options. No torch in here."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from nvfp4cli.errors import RecipeError

SCHEMES = ("w4a16", "none")
LAYOUT_NAMES = ("torchao", "comfy", "compressed-tensors", "modelopt")
ROTATIONS = ("none", "r1", "r2", "r1r2")
ROTATION_KINDS = ("hadamard", "block-16", "block-32", "block-64", "block-128", "qr")
DTYPES = ("source", "bfloat16", "float16", "float32")

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is converted.

    scheme: w4a16 (NVFP4 weights) or none (folds only). layout: on-disk convention. rotate: which
    rotations are folded in, of which rotation_kind, from which seed. ignore: patterns of modules
    that stay in the source dtype. include: patterns of modules that are quantised although the
    architecture's spec keeps them (lm_head). dtype: of the tensors that are not quantised.
    max_shard_size: of an output file, such as "5GB".
    """

    scheme: str = "w4a16"
    layout: str = "torchao"
    rotate: str = "none"
    rotation_kind: str = "hadamard"
    seed: int = 0
    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    dtype: str = "source"
    max_shard_size: str = "5GB"

    def __post_init__(self) -> None:
        _choice("scheme", self.scheme, SCHEMES)
        _choice("layout", self.layout, LAYOUT_NAMES)
        _choice("rotate", self.rotate, ROTATIONS)
        _choice("rotation_kind", self.rotation_kind, ROTATION_KINDS)
        _choice("dtype", self.dtype, DTYPES)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise RecipeError(f"seed is {self.seed!r}: give a whole number from 0 up.")
        for key, patterns in (("ignore", self.ignore), ("include", self.include)):
            if not isinstance(patterns, tuple) or not all(isinstance(p, str) for p in patterns):
                raise RecipeError(f"{key} is {patterns!r}: give a list of patterns.")
        self.max_shard_bytes  # noqa: B018  the property checks the text

    @property
    def max_shard_bytes(self) -> int:
        """max_shard_size in bytes."""
        text = str(self.max_shard_size).strip().upper()
        number, unit = text[:-2], text[-2:]
        try:
            size = round(float(number) * _UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            size = 0
        if size <= 0:
            raise RecipeError(
                f"max_shard_size is {self.max_shard_size!r}: give a number and KB, MB, GB or TB, "
                "such as 5GB."
            )
        return size

    def merged(self, **options: Any) -> "Recipe":
        """A recipe in which every option that is not None replaces the recipe's own value."""
        return replace(self, **{key: v for key, v in options.items() if v is not None})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON hold them."""
        return {**asdict(self), "ignore": list(self.ignore), "include": list(self.include)}


def load(name: str) -> Recipe:
    """A recipe from a file, or from those that come with the tool by name ("vllm").

    The nvfp4.yaml that every output holds is accepted too. Raises RecipeError for an unknown key
    or value.
    """
    path = Path(name)
    if not path.is_file():
        path = recipes_folder() / f"{name}.yaml"
    if not path.is_file():
        raise RecipeError(
            f"No recipe file {name!r}: give the path of one, or one of {', '.join(known())}."
        )
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path} is not a readable YAML file ({reason}): correct it.") from None
    if document is None:
        document = {}
    if isinstance(document, dict) and "nvfp4_version" in document:
        document = document.get("recipe")
    if not isinstance(document, dict):
        raise RecipeError(f"{path} is no recipe: write lines such as `layout: torchao`.")
    known_keys = {field.name for field in fields(Recipe)}
    if unknown := [str(key) for key in document if key not in known_keys]:
        raise RecipeError(
            f"{path} has the unknown key {unknown[0]!r}: the keys are "
            f"{', '.join(sorted(known_keys))}."
        )
    lists = {key: tuple(v) for key, v in document.items() if isinstance(v, list)}
    return Recipe(**{**document, **lists})


def recipes_folder() -> Path:
    """Where the shipped recipes lie: beside the package, or inside it once installed."""
    here = Path(__file__).parent
    inside = here / "configs"
    return inside if inside.is_dir() else here.parent / "configs"


def known() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def _choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RecipeError(f"{key} is {value!r}: choose one of {', '.join(choices)}.")
