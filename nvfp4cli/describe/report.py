"""Any checkpoint -> facts and violated invariants, from the written files alone."""

from dataclasses import asdict, dataclass
from typing import Any

from nvfp4cli.checkpoint.reader import Checkpoint
from nvfp4cli.describe import agreement, architecture, folder, inventory, scales, structure, values
from nvfp4cli.describe.agreement import Stated
from nvfp4cli.describe.inventory import Inventory
from nvfp4cli.describe.record import Figures, Violation, Weight
from nvfp4cli.layouts import branch

_NO_FIGURES = dict.fromkeys(Figures.__dataclass_fields__)


@dataclass(frozen=True)
class Report:
    """What a checkpoint holds.

    scheme: "w4a16" or "w4a4" for NVFP4, "fp8", "mxfp4" or "none", "mixed" for several of them.
    rotation: kind, seed and sizes; kind "unknown" where no record of a run stands beside the
    weights, since an orthogonal matrix leaves no trace in them. figures: of NVFP4 weights, by name.
    unreadable: names of NVFP4 weights too damaged to decode.
    """

    inventory: Inventory
    scheme: str
    rotation: dict[str, Any]
    figures: dict[str, Figures]
    violations: tuple[Violation, ...]
    unreadable: frozenset[str]

    @property
    def layout(self) -> str:
        """The layout's name, "none" without NVFP4 weights."""
        return self.inventory.layout.NAME if self.inventory.layout else "none"

    @property
    def ranks(self) -> list[int]:
        """Of the low-rank branches beside NVFP4 weights."""
        return [figures.rank for figures in self.figures.values() if figures.rank is not None]

    @property
    def totals(self) -> dict[str, Any]:
        """Parameters, those in a quantised format, bits per parameter and bytes of all tensors."""
        weights = self.inventory.weights
        parameters = sum(weight.numel for weight in weights)
        nbytes = self.inventory.checkpoint.nbytes
        return {
            "parameters": parameters,
            "quantized_parameters": sum(w.numel for w in weights if w.format != "plain"),
            "bits_per_parameter": 8 * nbytes / parameters if parameters else 0.0,
            "bytes": nbytes,
        }

    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        checkpoint, layout = self.inventory.checkpoint, self.inventory.layout
        swizzled = "swizzled" if layout is not None and layout.SWIZZLED else "linear"
        return {
            "model_type": checkpoint.config.get("model_type"),
            "layout": self.layout,
            "scheme": self.scheme,
            "scales": swizzled if layout is not None else None,
            "rotation": self.rotation,
            "totals": self.totals,
            "files": [
                {"name": file, "bytes": (checkpoint.folder / file).stat().st_size}
                for file in sorted(checkpoint.metadata)
            ],
            "tensors": [self._tensor(weight) for weight in self.inventory.weights],
            "violations": [asdict(violation) for violation in self.violations],
        }

    def stored_bytes(self, weight: Weight) -> int:
        """Bytes of all parts."""
        return sum(self.inventory.checkpoint.tensors[part].nbytes for part in weight.parts)

    def _tensor(self, weight: Weight) -> dict[str, Any]:
        dtype = self.inventory.checkpoint.tensors[weight.parts[0]].dtype
        figures = self.figures.get(weight.name)
        return {
            "name": weight.name,
            "shape": list(weight.shape) if weight.shape is not None else None,
            "format": weight.format,
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": self.stored_bytes(weight),
            **(asdict(figures) if figures else _NO_FIGURES),
        }


def describe(checkpoint: Checkpoint) -> Report:
    """Read a checkpoint once, one weight at a time, and check every invariant.

    Raises CheckpointError where a file beside the weights cannot be understood.
    """
    found = inventory.take(checkpoint)
    said = agreement.stated(checkpoint)
    violations = [
        *folder.check_folder(checkpoint),
        *agreement.check_configuration(found, said),
        *architecture.check_architecture(found),
        *structure.check_names(found),
    ]
    if found.unreadable:
        violations.append(Violation(None, "unreadable", found.unreadable))
    if found.layout is not None and found.layout.NAME == "torchao":
        violations += structure.check_torchao_header(found)
    violations += scales.check_groups(architecture.fused_groups(found), found)
    figures, unreadable = {}, set()
    for weight in found.weights:
        if weight.format != "nvfp4":
            for part in weight.parts:
                violations += values.check_finite(part, checkpoint)
            violations += scales.check_weight_scale(weight, found)
            continue
        broken = structure.check_parts(weight, found)
        if not broken:
            figures[weight.name], faults = scales.measure(weight, found)
            violations += [*structure.check_marker(weight, found), *faults]
        if broken or figures[weight.name].global_scale is None:
            unreadable.add(weight.name)
        violations += broken
        for half in (part for part in weight.parts if part.endswith(branch.HALVES)):
            violations += values.check_finite(half, checkpoint)
    for name in found.cache_scales:
        violations += scales.read_scale(name, checkpoint, None)[1]
    record = folder.read_record(checkpoint.folder)
    unknown: dict[str, Any] = {"kind": "unknown", "seed": None, "sizes": {}}
    rotation = record.rotation if record else unknown
    scheme = _scheme(found, said)
    return Report(found, scheme, rotation, figures, tuple(violations), frozenset(unreadable))


def _scheme(found: Inventory, said: Stated) -> str:
    formats = {weight.format for weight in found.weights} - {"plain"}
    if len(formats) > 1:
        return "mixed"
    if formats != {"nvfp4"}:
        return formats.pop() if formats else "none"
    claims = (
        said.configuration.claim(weight.module) if said.configuration else None
        for weight in found.nvfp4
    )
    # Activations that are quantised dynamically leave no tensor: there the configuration tells.
    dynamic = any(claim and claim.activations and not claim.input_scale for claim in claims)
    static = any(found.input_scale(weight) for weight in found.nvfp4)
    return "w4a4" if static or dynamic else "w4a16"
