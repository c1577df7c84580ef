"""The command that reads checkpoints without running them: inspect."""

import re
from collections.abc import Callable, Iterable, Sequence

from nvfp4cli.checkpoint import hub
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli import console
from nvfp4cli.describe.against import Comparison, compare
from nvfp4cli.describe.record import Figures, Violation, Weight
from nvfp4cli.describe.report import Report, describe

_SHOWN_WEIGHTS = 24  # a model with more of them is shown by kinds
_SHOWN_VIOLATIONS = 20


def inspect(checkpoint: str, against: str | None, revision: str | None, *, as_json: bool) -> bool:
    """Describe, compare and show; True where an invariant is violated."""
    report = describe(open_checkpoint(hub.resolve(checkpoint, revision)))
    comparison = None
    if against is not None:
        source = open_checkpoint(hub.resolve(against))
        comparison = compare(report.inventory, source, against, report.unreadable)
    violations = [*report.violations, *(comparison.violations if comparison else ())]
    if as_json:
        facts = report.facts()
        if comparison:
            facts["violations"] += [vars(violation) for violation in comparison.violations]
            facts["against"] = comparison.facts()
        console.print_json(facts)
    else:
        _show(report, checkpoint)
        if comparison:
            _show_comparison(comparison)
        _show_violations(violations)
    return bool(violations)


def _show(report: Report, name: str) -> None:
    facts, totals = report.facts(), report.totals
    parameters = max(1, totals["parameters"])
    sizes = ", ".join(f"{key} {size}" for key, size in report.rotation["sizes"].items())
    rotation = report.rotation["kind"] + (f" ({sizes})" if sizes else "")
    files = len(facts["files"])
    console.line(f"{name}: {facts['model_type'] or 'unknown model_type'}")
    console.line(
        f"  layout {report.layout}, scheme {report.scheme}, scales {facts['scales'] or 'none'}, "
        f"rotation {rotation}"
    )
    console.line(
        f"  {totals['parameters']:,} parameters, "
        f"{totals['quantized_parameters'] / parameters:.1%} of them quantised, "
        f"{totals['bits_per_parameter']:.2f} bits each, {console.size(totals['bytes'])} in "
        f"{files} file{'s' if files > 1 else ''}"
    )
    if ranks := report.ranks:
        console.line(
            f"  low-rank branches (SVDQuant) of rank {_range(ranks, str)} beside {len(ranks)} "
            "weights"
        )
    _show_weights(report)


def _show_weights(report: Report) -> None:
    """One row for each weight of a small model, or for each kind of weight with its range."""
    weights = report.inventory.weights
    few = len(weights) <= _SHOWN_WEIGHTS
    kinds: dict[str, list[Weight]] = {}
    for weight in weights:
        key = weight.name if few else re.sub(r"(?<=\.)\d+(?=\.)", "*", weight.name)
        kinds.setdefault(key, []).append(weight)
    columns = ("tensor", "count", "shape", "format", "size", "global scale", "largest block scale",
               "zero scales", "subnormal", "zero codes")  # fmt: skip
    rows = [(key, *_row(members, report)) for key, members in kinds.items()]
    console.table("Tensors", columns, rows)
    if not few:
        console.line(f"{len(weights)} tensors, ranges over those of a kind; all with --json.")


def _row(members: list[Weight], report: Report) -> tuple[object, ...]:
    figures = [report.figures[w.name] for w in members if w.name in report.figures]
    tensors = report.inventory.checkpoint.tensors

    def figure(value: Callable[[Figures], float], form: Callable[[float], str]) -> str:
        return _range([value(f) for f in figures], form)

    shapes = {"x".join(map(str, w.shape)) if w.shape else "-" for w in members}
    formats = {
        str(tensors[w.parts[0]].dtype).removeprefix("torch.") if w.format == "plain" else w.format
        for w in members
    }
    return (
        len(members),
        " ".join(sorted(shapes)),
        " ".join(sorted(formats)),
        console.size(sum(report.stored_bytes(w) for w in members)),
        _range([g for f in figures if (g := f.global_scale) is not None], "{:.2e}".format),
        figure(lambda f: f.max_block_scale, "{:g}".format),
        figure(lambda f: f.zero_scale_share, "{:.2%}".format),
        figure(lambda f: f.subnormal_scale_share, "{:.2%}".format),
        figure(lambda f: f.zero_code_share, "{:.1%}".format),
    )


def _range(values: Sequence[float], form: Callable[[float], str]) -> str:
    if not values:
        return ""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low}..{high}"


def _show_comparison(comparison: Comparison) -> None:
    mean = comparison.mean_snr_db
    kinds = [deviation.kind for deviation in comparison.deviations]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    average = f"mean SNR {mean:.2f} dB" if mean is not None else "no error"
    console.line(f"Against {comparison.source}: {average}; {counts}.")
    if comparison.worst:
        console.table(
            f"The {len(comparison.worst)} lowest signal-to-noise ratios",
            ("tensor", "kind", "SNR dB", "relative error", "largest error"),
            (
                (d.name, d.kind, f"{d.snr_db:.2f}", f"{d.relative_error:.4f}",
                 f"{d.max_abs_error:.3g}")
                for d in comparison.worst
            ),
        )  # fmt: skip


def _show_violations(violations: Iterable[Violation]) -> None:
    found = list(violations)
    if not found:
        console.line("No invariant is violated.")
        return
    console.line(f"{len(found)} violation{'s' if len(found) > 1 else ''}:")
    for violation in found[:_SHOWN_VIOLATIONS]:
        console.line(f"  {violation.rule}: {violation.message}")
    if len(found) > _SHOWN_VIOLATIONS:
        console.line(f"  and {len(found) - _SHOWN_VIOLATIONS} more; all with --json.")
