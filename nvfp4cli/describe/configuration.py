"""What config.json says is quantised, for each module, in the words of each quant_method.

compressed-tensors: quantization/quant_config.py; ModelOpt: modelopt/torch/export; torchao:
transformers' TorchAoConfig; fp8: transformers' FineGrainedFP8Config.
"""

import fnmatch
import re
from dataclasses import dataclass
from typing import Any

from nvfp4cli.errors import CheckpointError
from nvfp4cli.formats.nvfp4 import BLOCK

_MXFP4_BLOCK = 32
_LINEAR = "Linear"
_CONVERTERS = ("fp8", "torchao")  # whose names are those of transformers


@dataclass(frozen=True)
class Claim:
    """How a module is said to be stored.

    format: as in `record.Format`, or "other". activations: they are quantised too. input_scale: to
    which end a static scale is stored.
    """

    format: str
    activations: bool = False
    input_scale: bool = False


@dataclass(frozen=True)
class Configuration:
    """A quantization_config.

    groups: (targets, claim), the first that names a module wins, before class names. ignore:
    patterns of modules left alone. understood: False where this tool cannot say which modules the
    method quantises. cache: the KV cache is said to have static scales. whole: a pattern without
    `re:` is a whole name, elsewhere it may be a part of one between dots, or hold `*`. spares:
    heads and routers are left alone without being listed. branches: quantised weights have low-rank
    branches beside them.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Claim], ...] = ()
    ignore: tuple[str, ...] = ()
    understood: bool = True
    cache: bool = False
    whole: bool = False
    spares: bool = False
    branches: bool = False

    @property
    def exclusions(self) -> str:
        """The entry that lists what is left alone."""
        return "ignore" if self.method not in _CONVERTERS else "modules_to_not_convert"

    def claim(self, module: str) -> Claim | None:
        """What is said of a linear module, None where it is left alone."""
        if any(_matches(pattern, module, self.whole) for pattern in self.ignore):
            return None
        by_class = None
        for targets, claim in self.groups:
            if any(_matches(t, module, self.whole) for t in targets if t != _LINEAR):
                return claim
            if _LINEAR in targets and by_class is None:
                by_class = claim
        return by_class


def parse(quantization: dict[str, Any]) -> Configuration:
    """A quantization_config, or the `quantization` of hf_quant_config.json with its method.

    Raises CheckpointError for one whose entries have the wrong types.
    """
    method = str(quantization.get("quant_method", ""))
    try:
        if method == "compressed-tensors":
            return _compressed_tensors(method, quantization)
        if method.startswith("modelopt"):
            return _modelopt(method, quantization)
        if method == "torchao":
            return _torchao(method, quantization)
        if method == "fp8":
            ignore = quantization.get("modules_to_not_convert") or ()
            groups = (((_LINEAR,), Claim("fp8", True)),)
            return Configuration(method, groups, tuple(ignore), spares=True)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"The quantization_config of the checkpoint is malformed ({error}): quantise the "
            "source again."
        ) from None
    return Configuration(method, understood=False)


def _compressed_tensors(method: str, quantization: dict[str, Any]) -> Configuration:
    groups = tuple(
        (tuple(group["targets"]), _group_claim(group))
        for _, group in sorted(quantization["config_groups"].items())
    )
    return Configuration(
        method,
        groups,
        ignore=tuple(quantization.get("ignore") or ()),
        cache=_static_cache(quantization),
        whole=True,
    )


def _group_claim(group: dict[str, Any]) -> Claim:
    weights, inputs = group["weights"], group.get("input_activations")
    kind = (weights.get("type", "float"), weights["num_bits"], weights.get("group_size"))
    name = {("float", 4, BLOCK): "nvfp4", ("float", 4, _MXFP4_BLOCK): "mxfp4"}.get(kind, "other")
    if kind[:2] == ("float", 8):
        name = "fp8"
    # "local" computes block scales at run time, under a static global scale.
    static = inputs is not None and inputs.get("dynamic") is not True
    return Claim(name, inputs is not None, static)


def _modelopt(method: str, quantization: dict[str, Any]) -> Configuration:
    algorithm = str(quantization.get("quant_algo"))
    groups = quantization.get("config_groups") or {}
    layers = quantization.get("quantized_layers")
    if layers:
        claims = tuple(((name,), _modelopt_claim(entry, {})) for name, entry in layers.items())
    elif algorithm == "MIXED_PRECISION":
        claims = tuple((tuple(g["targets"]), _group_claim(g)) for _, g in sorted(groups.items()))
    else:
        claims = (((_LINEAR,), _modelopt_claim(quantization, groups)),)
    ignore = quantization.get("ignore") or quantization.get("exclude_modules") or ()
    return Configuration(
        method,
        claims,
        ignore=tuple(ignore),
        cache=_static_cache(quantization) or quantization.get("kv_cache_quant_algo") is not None,
        branches=algorithm == "NVFP4_SVD",
    )


def _modelopt_claim(entry: dict[str, Any], groups: dict[str, Any]) -> Claim:
    """entry: what holds quant_algo. As engines do, groups without activations overrule NVFP4."""
    algorithm = str(entry.get("quant_algo"))
    sizes = [entry.get("group_size")]
    sizes += [group["weights"].get("group_size") for group in groups.values()]
    if any(size not in (None, BLOCK) for size in sizes):
        return Claim("other")
    if "NVFP4" in algorithm:
        only = "W4A16" in algorithm
        only |= bool(groups) and not any(g.get("input_activations") for g in groups.values())
        return Claim("nvfp4", not only, not only)
    if algorithm.startswith("FP8"):
        return Claim("fp8", True, algorithm == "FP8")
    return Claim("other")


def _torchao(method: str, quantization: dict[str, Any]) -> Configuration:
    config = quantization["quant_type"]["default"]
    kind = config["_type"]
    dynamic = "Dynamic" in kind or config.get("_data", {}).get("mm_config") == "DYNAMIC"
    ignore = tuple(quantization.get("modules_to_not_convert") or ())
    if not quantization.get("include_input_output_embeddings"):
        ignore += ("lm_head",)
    groups = (((_LINEAR,), Claim("nvfp4" if "NVFP4" in kind else "other", dynamic)),)
    return Configuration(method, groups, ignore, understood="NVFP4" in kind)


def _static_cache(quantization: dict[str, Any]) -> bool:
    scheme = quantization.get("kv_cache_scheme")
    return scheme is not None and (isinstance(scheme, str) or scheme.get("dynamic") is not True)


def _matches(pattern: str, module: str, whole: bool) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise CheckpointError(
                f"The quantization_config has {pattern!r}, which is no regular expression "
                f"({error}): mend it."
            ) from None
    if whole:
        return pattern == module
    return f".{pattern}." in f".{module}." or fnmatch.fnmatchcase(module, pattern)
