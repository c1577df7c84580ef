"""A recipe: what the user wishes, as a flat YAML file or as options. No torch in here."""

import difflib
import re
from collections.abc import Hashable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from nvfp4cli.errors import RecipeError, UsageError

SCHEMES = ("w4a16", "w4a4", "none")
LAYOUT_NAMES = ("torchao", "comfy", "compressed-tensors", "modelopt")
ROTATIONS = ("none", "r1", "r2", "r1r2")
ROTATION_KINDS = ("hadamard", "block-16", "block-32", "block-64", "block-128", "qr")
DTYPES = ("source", "bfloat16", "float16", "float32")
MTP = ("keep", "drop")
METHODS = ("rtn", "four-over-six", "mse", "mse-block", "gptq", "awq", "svd")
SCALES = ("rtn", "four-over-six", "mse", "mse-block")
COMPENSATED = ("gptq", "svd")  # methods that make errors good by what a text shows
CORRELATED = (*COMPENSATED, "mse-block")  # those that ask how the channels of inputs go together
SEARCHED = (*COMPENSATED, "awq")  # those whose block scales are a choice of their own
KV_CACHES = ("none", "fp8", "nvfp4")
RANDOM_TEXT = "random"

# Their engines find the global scale of activations while the model runs; others store it.
DYNAMIC_LAYOUTS = ("torchao",)

_CHOICES = {
    "scheme": SCHEMES,
    "layout": LAYOUT_NAMES,
    "rotate": ROTATIONS,
    "rotation_kind": ROTATION_KINDS,
    "dtype": DTYPES,
    "mtp": MTP,
    "method": METHODS,
    "scales": SCALES,
    "kv_cache": KV_CACHES,
}
# Whole numbers -> the least and the largest that makes sense.
_COUNTS = {"rank": (1, 1024), "sequences": (2, 2**20), "sequence_length": (16, 2**20),
           "keep_first": (0, 2**20), "keep_last": (0, 2**20), "keep_worst": (0, 2**20)}  # fmt: skip
_BITS = (4.5, 16)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SEEDS = 2**64  # what readers of the record in other languages hold


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is converted.

    scheme: w4a16 (NVFP4 weights), w4a4 (activations too, with static global scales or, in the
    layout torchao, dynamic ones) or none (folds only). method: how codes are chosen: to nearest
    (rtn, four-over-six, mse, mse-block), or with errors made good by what calibration text shows
    (gptq), or so and beside a branch of low rank in bf16 (svd), of which rank is the rank; awq is
    to nearest too, with channel_scales: these make channels of inputs smaller and the columns that
    read them larger, as calibration text approves. scales: how the scale of a block is chosen under
    gptq, svd and awq. kv_cache: the format that engines keep keys and values in, with scales from
    calibration. text: file of the calibration text, of which the first `sequences` of
    `sequence_length` tokens are used, or "random", for tokens drawn from `seed`; None: a text that
    comes with the tool. bits: that a value of the weights to be quantised may take on average; the
    groups of weights that cost the model most are FP8 then, or stay in the source dtype. None: all
    are NVFP4. keep_worst: how many groups, those that would cost most, stay in the source dtype
    beside that. keep_first, keep_last: decoder layers at the ends that stay in the source dtype.
    layout: on-disk convention. rotate: which rotations are folded in, of which rotation_kind, from
    which seed. ignore: patterns of modules that stay in the source dtype. include: patterns of
    modules that are quantised although the architecture's spec keeps them (lm_head). dtype: of the
    tensors that are not quantised. mtp: whether layers that predict further tokens (speculative
    decoding) are kept, in the source dtype, or left out. max_shard_size: of an output file, such as
    "5GB".

    Raises RecipeError for a value that makes no sense.
    """

    scheme: str = "w4a16"
    method: str = "rtn"
    scales: str = "mse"
    channel_scales: bool = False
    rank: int = 32
    kv_cache: str = "none"
    text: str | None = None
    sequences: int = 128
    sequence_length: int = 512
    bits: float | None = None
    keep_worst: int = 0
    keep_first: int = 0
    keep_last: int = 0
    layout: str = "torchao"
    rotate: str = "none"
    rotation_kind: str = "hadamard"
    seed: int = 0
    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    dtype: str = "source"
    mtp: str = "keep"
    max_shard_size: str = "5GB"

    def __post_init__(self) -> None:
        for field in fields(self):
            if fault := _fault(field.name, getattr(self, field.name)):
                raise RecipeError(f"{field.name} {fault}")

    @property
    def needs_text(self) -> bool:
        """The run has to see what the model computes of a calibration text."""
        if self.scheme == "none":
            return False
        weighed = self.method == "mse" and self.text is not None
        scaled = self.input_scales or self.kv_cache != "none"
        needed = self.measures or self.scales_channels or self.method in CORRELATED
        return weighed or scaled or needed

    @property
    def scales_channels(self) -> bool:
        """Factors of channels are looked for."""
        return self.scheme != "none" and (self.channel_scales or self.method == "awq")

    @property
    def measures(self) -> bool:
        """Formats are chosen by what they cost the model."""
        return self.scheme != "none" and (self.bits is not None or self.keep_worst > 0)

    @property
    def input_scales(self) -> bool:
        """Static scales of activations are stored."""
        return self.scheme == "w4a4" and self.layout not in DYNAMIC_LAYOUTS

    @property
    def block_scales(self) -> str:
        """How the scale of a block is chosen: rtn, four-over-six, mse or mse-block."""
        return self.scales if self.method in SEARCHED else self.method

    @property
    def max_shard_bytes(self) -> int:
        """max_shard_size in bytes."""
        return _bytes(self.max_shard_size)

    def merged(self, **options: Any) -> "Recipe":
        """A recipe in which every option that is not None replaces the recipe's own value.

        Raises UsageError for a value that makes no sense, naming it as an option.
        """
        given = {key: value for key, value in options.items() if value is not None}
        for key, value in given.items():
            if fault := _fault(key, value):
                raise UsageError(f"--{key.replace('_', '-')} {fault}")
        return replace(self, **given)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON hold them."""
        return {**asdict(self), "ignore": list(self.ignore), "include": list(self.include)}


def load(name: str) -> Recipe:
    """A recipe from a file, or from those that come with the tool by name ("vllm").

    The nvfp4.yaml that every output holds is accepted too. Raises RecipeError for a file that
    cannot be read, an unknown or repeated key and a value that makes no sense.
    """
    path = _path(name)
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise RecipeError(
            f"{path} cannot be read ({error.strerror}): name another recipe file."
        ) from None
    # ValueError: of what is no UTF-8, and of numbers and dates that YAML's own reading rejects.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        raise RecipeError(f"{path} is not a readable YAML file ({reason}): correct it.") from None
    if document is None:
        document = {}
    if isinstance(document, dict) and "nvfp4_version" in document:
        document = document.get("recipe")
    if not isinstance(document, dict):
        raise RecipeError(f"{path} is no recipe: write lines such as `layout: torchao`.")
    known_keys = sorted(field.name for field in fields(Recipe))
    for key in document:
        if key not in known_keys:
            raise RecipeError(
                f"{path} has the unknown key {key!r}{_nearest(str(key), known_keys)}: the keys are "
                f"{', '.join(known_keys)}."
            )
    lists = {key: tuple(v) for key, v in document.items() if isinstance(v, list)}
    try:
        return Recipe(**{**document, **lists})
    except RecipeError as error:
        raise RecipeError(f"In {path}, {error}") from None


def recipes_folder() -> Path:
    """Where the shipped recipes lie: beside the package, or inside it once installed."""
    here = Path(__file__).parent
    inside = here / "configs"
    return inside if inside.is_dir() else here.parent / "configs"


def known() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def _path(name: str) -> Path:
    """The file that a name stands for; a file of the user's wins over a shipped recipe."""
    path = Path(name).expanduser()
    try:
        found = bool(name) and path.exists()  # an empty name is no name of this folder
        folder = found and path.is_dir()
    except OSError as error:  # a name too long, or a folder that may not be entered
        raise RecipeError(
            f"{name} cannot be read ({error.strerror}): give the path of a recipe file, or one of "
            f"{', '.join(known())}."
        ) from None
    if found and not folder:
        return path
    if name in known():
        return recipes_folder() / f"{name}.yaml"
    if folder:
        raise RecipeError(f"{name} is a folder: name the recipe file in it.")
    raise RecipeError(
        f"No recipe file {name!r}{_nearest(name, known())}: give the path of one, or one of "
        f"{', '.join(known())}."
    )


def _nearest(word: str, words: list[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which PyYAML keeps the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping. Raises ConstructorError for a repeated key."""
        seen = set()
        for scalar in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if scalar.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {scalar.value!r} stands twice", scalar.start_mark
                )
            seen.add(scalar.value)
        return super().construct_mapping(node, deep=deep)


def _fault(key: str, value: Any) -> str | None:
    """What is wrong with the value of a key, to follow its name in a sentence; None if nothing."""
    shown = list(value) if isinstance(value, tuple) else value
    if key in _CHOICES:
        choices = _CHOICES[key]
        return None if value in choices else f"is {shown!r}: choose one of {', '.join(choices)}."
    if key in _COUNTS:
        least, most = _COUNTS[key]
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole and least <= value <= most
        return None if fits else f"is {shown!r}: give a whole number from {least} to {most}."
    if key == "channel_scales":
        return None if isinstance(value, bool) else f"is {shown!r}: write true or false."
    if key == "bits":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = value is None or (number and _BITS[0] <= value <= _BITS[1])
        return None if fits else f"is {shown!r}: give a number from {_BITS[0]} to {_BITS[1]}."
    if key == "text":
        fits = value is None or (isinstance(value, str) and bool(value))
        return None if fits else f"is {shown!r}: name a text file."
    if key == "seed":
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole and 0 <= value < _SEEDS
        return None if fits else f"is {shown!r}: give a whole number from 0 to 2^64 - 1."
    if key == "max_shard_size":
        wanted = "give a number and KB, MB, GB or TB, such as 5GB"
        return None if _bytes(value) else f"is {shown!r}: {wanted}."
    if not isinstance(value, tuple) or not all(isinstance(pattern, str) for pattern in value):
        return f"is {shown!r}: give a list of patterns."
    return _wrong_pattern(value)


def _wrong_pattern(patterns: tuple[str, ...]) -> str | None:
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                return (
                    f"has {pattern!r}, which is no regular expression ({error}): mend it, or use * "
                    "for any text."
                )
    return None


def _bytes(size: Any) -> int:
    """Bytes of a size such as "5GB"; 0 for what is none."""
    text = str(size).strip().upper()
    number, unit = text[:-2], text[-2:]
    try:
        return max(0, round(float(number) * _UNITS[unit]))
    except (ValueError, KeyError, OverflowError):
        return 0
