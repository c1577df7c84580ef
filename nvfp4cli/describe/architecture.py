"""Invariants between the tensors and the architecture: their names, the head, fused layers."""

from collections.abc import Iterator
from typing import Any

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.describe.inventory import Inventory
from nvfp4cli.describe.record import Violation, Weight
from nvfp4cli.describe.values import same_bytes
from nvfp4cli.errors import CheckpointError, UnsupportedError
from nvfp4cli.models import spec as specs
from nvfp4cli.models.claims import claim, fused_module
from nvfp4cli.models.spec import ArchSpec

# What engines merge at load time, by the last part of a module's name, where no spec tells.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_MERGED = {leaf: "+".join(leaves) for leaves in _SIBLINGS for leaf in leaves}
_HEADS = ("lm_head", "embed_out", "output", "head")
# Layers that engines compute in the source dtype whatever a configuration says of linear layers:
# routers, the gates of shared experts, and what joins the inputs of DeepSeek's further tokens.
_NEVER_QUANTIZED = frozenset(("gate", "router", "shared_expert_gate", "eh_proj"))


def spec_of(checkpoint: Checkpoint) -> ArchSpec | None:
    """The spec of the checkpoint's model_type, stored beside it or the tool's own, if any."""
    path = specs.beside(checkpoint.folder, checkpoint.config.get("model_type"))
    return specs.load_for(checkpoint.config, checkpoint.tensors.keys(), path) if path else None


def check_architecture(inventory: Inventory) -> Iterator[Violation]:
    """Every tensor the model_type has, and no other; the output head tied or not, as is said."""
    checkpoint = inventory.checkpoint
    spec = spec_of(checkpoint)
    config = spec.language(checkpoint.config) if spec else checkpoint.config
    tied = _tied(config, spec)
    modules = {
        weight.module: weight for weight in inventory.weights if weight.name.endswith(".weight")
    }
    heads = [module for module in modules if module.rpartition(".")[2] in _HEADS]
    if tied and "lm_head" in modules:
        yield from _check_tied_head(modules, checkpoint)
    causal = any("CausalLM" in str(name) for name in config.get("architectures") or ())
    if spec is None and tied is False and causal and not heads:
        message = (
            "config.json sets tie_word_embeddings to false and no output head is stored, so that "
            "engines make up a random one: set it to true, or complete the checkpoint."
        )
        yield Violation(None, "head", message)
    if spec is not None and inventory.unreadable is None:
        try:
            claim(spec, [weight.name for weight in inventory.weights], config)
        except (UnsupportedError, CheckpointError) as error:
            yield Violation(None, "architecture", str(error))


def spared(module: str) -> bool:
    """True for an output head and for what engines never build as a quantised linear layer."""
    path = module.split(".")
    return path[-1] in _HEADS or not _NEVER_QUANTIZED.isdisjoint(path)


def fused_groups(inventory: Inventory) -> list[tuple[str, list[Weight]]]:
    """Linear modules that engines merge: (name of the merged module, its members)."""
    spec = spec_of(inventory.checkpoint)
    groups: dict[str, list[Weight]] = {}
    for module, weight in inventory.linears.items():
        parent, _, leaf = module.rpartition(".")
        fused = fused_module(spec, module) if spec else None
        if fused is None and leaf in _MERGED:
            fused = f"{parent}.{_MERGED[leaf]}"
        if fused is not None:
            groups.setdefault(fused, []).append(weight)
    return [(name, members) for name, members in groups.items() if len(members) > 1]


def _tied(config: dict[str, Any], spec: ArchSpec | None) -> bool | None:
    """None where neither config.json nor a spec tells."""
    if spec is not None:
        return spec.tied(config)
    said = config.get("tie_word_embeddings")
    return said if isinstance(said, bool) else None


def _check_tied_head(modules: dict[str, Weight], checkpoint: Checkpoint) -> Iterator[Violation]:
    """A stored copy of the embedding does no harm; anything else is dropped by engines."""
    head = modules["lm_head"]
    tables = [m for m in modules if m.endswith("embed_tokens")]
    if head.format == "plain" and len(tables) == 1:
        other, own = (checkpoint.tensors[modules[m].parts[0]] for m in (tables[0], "lm_head"))
        if same_bytes(own, checkpoint, other, checkpoint):
            return
    message = (
        "config.json ties the output head to the embedding and a different lm_head.weight is "
        "stored, which engines ignore: set tie_word_embeddings to false, or remove the tensor."
    )
    yield Violation(head.name, "head", message)
