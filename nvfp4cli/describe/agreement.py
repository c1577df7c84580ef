"""Invariants between the tensors and what config.json and hf_quant_config.json say of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nvfp4cli.checkpoint.reader import Checkpoint, read_json
from nvfp4cli.describe.architecture import spared, spec_of
from nvfp4cli.describe.configuration import Configuration, parse
from nvfp4cli.describe.inventory import Inventory
from nvfp4cli.describe.record import Violation, Weight
from nvfp4cli.layouts.record import Contents

HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclass(frozen=True)
class Stated:
    """What the files beside the weights say. Both None where nothing is said."""

    inline: Configuration | None  # config.json
    beside: Configuration | None  # hf_quant_config.json

    @property
    def configuration(self) -> Configuration | None:
        """What engines go by."""
        return self.inline or self.beside


def stated(checkpoint: Checkpoint) -> Stated:
    """Read both configurations. Raises CheckpointError where one is malformed."""
    path = checkpoint.folder / HF_QUANT_CONFIG
    beside = None
    if path.is_file():
        beside = parse({"quant_method": "modelopt", **read_json(path).get("quantization", {})})
    found = _quantization(checkpoint.config)
    return Stated(parse(found) if found else None, beside)


def check_configuration(inventory: Inventory, said: Stated) -> Iterator[Violation]:
    """The modules that are said to be quantised are those that are, and in the same way."""
    configuration = said.configuration
    yield from _check_method(inventory, said)
    if configuration is None or not configuration.understood:
        return
    linears = _with_tied_head(inventory)
    for module, weight in linears.items():
        if configuration.spares and weight.format == "plain" and spared(module):
            continue
        yield from _check_claim(module, weight, configuration)
    yield from _check_activations(inventory, configuration)
    yield from _check_branches(inventory, configuration)
    yield from _check_cache(inventory, configuration)
    if said.inline and said.beside and said.inline.method.startswith("modelopt"):
        yield from _check_beside(linears, said.inline, said.beside)


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    for level in (config, config.get("text_config")):
        if isinstance(level, dict) and isinstance(level.get("quantization_config"), dict):
            found = level["quantization_config"]
            assert isinstance(found, dict)
            return found
    return None


def _with_tied_head(inventory: Inventory) -> dict[str, Weight]:
    """The linear modules, and a head without a tensor of its own: engines build one for it."""
    spec = spec_of(inventory.checkpoint)
    found = dict(inventory.linears)
    if spec is not None and spec.tied(spec.language(inventory.checkpoint.config)):
        for module in spec.heads:
            head = Weight(f"{module.pattern}.weight", "plain", None, ())
            found.setdefault(module.pattern, head)
    return found


def _check_method(inventory: Inventory, said: Stated) -> Iterator[Violation]:
    layout, configuration = inventory.layout, said.configuration
    if layout is None:
        return
    wanted = layout.quantization_config(Contents((), (), False))
    method = wanted["quant_method"] if wanted else None
    if method and configuration is None:
        message = (
            f"config.json has no quantization_config, so that engines take the {layout.NAME} "
            "tensors for a damaged unquantised model: quantise the source again."
        )
        yield Violation(None, "config-missing", message)
    elif configuration and not (method and configuration.method.startswith(method)):
        message = (
            f"config.json names the quant_method {configuration.method!r} and the tensors have "
            f"the {layout.NAME} layout, which takes {repr(method) if method else 'none'}: quantise "
            "the source again."
        )
        yield Violation(None, "config-method", message)


def _check_claim(module: str, weight: Weight, configuration: Configuration) -> Iterator[Violation]:
    claim = configuration.claim(module)
    claimed = claim.format if claim else "plain"
    if claimed == weight.format:
        return
    if claimed == "plain":
        fault = f"leaves {module} unquantised and it is stored in {weight.format.upper()}"
    elif weight.format == "plain":
        fault = f"says that {module} is quantised and no scales of it are stored"
    else:
        fault = f"describes {module} as {claimed} and it is stored as {weight.format}"
    listing = f"list it in `{configuration.exclusions}`"
    step = listing if weight.format == "plain" else "quantise the source again"
    yield Violation(weight.name, "config-set", f"The quantization_config {fault}: {step}.")


def _check_activations(inventory: Inventory, configuration: Configuration) -> Iterator[Violation]:
    """Weight-only files must not be called W4A4, nor the reverse."""
    claims = [(weight, configuration.claim(weight.module)) for weight in inventory.nvfp4]
    agreed = [(weight, claim) for weight, claim in claims if claim and claim.format == "nvfp4"]
    said = [w for w, claim in agreed if claim.input_scale]
    bare = [w for w in said if inventory.input_scale(w) is None]
    if bare and len(bare) == len(said):
        message = (
            "The quantization_config says that activations are quantised and no input scale is "
            "stored: describe the checkpoint as weight-only, or quantise the source again."
        )
        yield Violation(None, "config-scheme", message)
    elif bare:
        for weight in bare:
            message = (
                f"{weight.module} has no input scale, which the quantization_config promises: "
                "quantise the source again."
            )
            yield Violation(weight.name, "part-missing", message)
    unsaid = [w for w, claim in agreed if not claim.input_scale and inventory.input_scale(w)]
    if unsaid:
        message = (
            f"{len(unsaid)} modules have static input scales, such as {unsaid[0].module}, which "
            "the quantization_config calls weight-only: describe the activations in it."
        )
        yield Violation(None, "config-scheme", message)


def _check_branches(inventory: Inventory, configuration: Configuration) -> Iterator[Violation]:
    """Weights whose branch an engine leaves out in silence are wrong, and so is the reverse."""
    bare = [weight for weight in inventory.nvfp4 if inventory.rank(weight) is None]
    beside = len(inventory.nvfp4) - len(bare)
    if configuration.branches and bare:
        message = (
            f"{len(bare)} weights, such as {bare[0].name}, lack the low-rank branch that the "
            "quantization_config promises (NVFP4_SVD): quantise the source again."
        )
        yield Violation(None, "config-scheme", message)
    elif beside and not configuration.branches:
        message = (
            f"{beside} weights have a low-rank branch of SVDQuant, and the quantization_config "
            "does not say so, so that engines leave it out: give NVFP4_SVD as the quant_algo."
        )
        yield Violation(None, "config-scheme", message)


# How the projections end that keys come from, alone or with others.
_KEYS = (".k_proj", ".qkv_proj", ".query_key_value", ".c_attn")


def _check_cache(inventory: Inventory, configuration: Configuration) -> Iterator[Violation]:
    keys, values = (
        {name.rpartition(".")[0] for name in inventory.cache_scales if name.endswith(ending)}
        for ending in (".k_scale", ".v_scale")
    )
    # ModelOpt stores them inside the projections, compressed-tensors beside these.
    keys = {name.removesuffix(".k_proj").removesuffix(".qkv_proj") for name in keys}
    values = {name.removesuffix(".v_proj").removesuffix(".qkv_proj") for name in values}
    attention = {m.rpartition(".")[0] for m in inventory.linears if m.endswith(_KEYS)}
    partial = sorted(keys ^ values) or sorted(attention - keys)
    if configuration.cache and not keys and not values:
        message = (
            "The quantization_config claims a quantised KV cache and no k_scale or v_scale is "
            "stored: remove the claim, or calibrate the cache."
        )
        yield Violation(None, "kv-cache", message)
    elif partial and (keys or values):
        message = (
            f"{partial[0]} lacks a k_scale or a v_scale, which other layers have: calibrate the "
            "cache again."
        )
        yield Violation(None, "kv-cache", message)
    if keys and not configuration.cache:
        message = (
            "Scales of a KV cache are stored and the quantization_config does not mention one: add "
            "a kv_cache_scheme."
        )
        yield Violation(None, "kv-cache", message)


def _check_beside(
    linears: dict[str, Weight], inline: Configuration, beside: Configuration
) -> Iterator[Violation]:
    differing = [m for m in linears if inline.claim(m) != beside.claim(m)]
    if differing or inline.cache != beside.cache:
        what = f"about {differing[0]}" if differing else "about the KV cache"
        message = (
            f"{HF_QUANT_CONFIG} and config.json disagree {what}, and engines differ in which they "
            "read: write the same facts into both."
        )
        yield Violation(None, "config-files", message)
