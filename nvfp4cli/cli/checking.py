"""The command that proves an architecture's spec on a small twin: check-model."""

from pathlib import Path
from typing import Any

from nvfp4cli.check.compare import LIMIT, Report, Verdict, check
from nvfp4cli.check.shrink import model_type_of
from nvfp4cli.checkpoint import hub
from nvfp4cli.checkpoint.files import CONFIG
from nvfp4cli.checkpoint.reader import read_json
from nvfp4cli.cli import console
from nvfp4cli.errors import UsageError
from nvfp4cli.models import spec as specs

_BLIND = (
    "Only text was compared, because how this model takes a picture is not known here: what lies "
    "between its vision tower and its language model is unproven."
)


def check_model(model: str, revision: str | None, arch_spec: Path | None, *, as_json: bool) -> bool:
    """Check and show; True where a rotation changes what the model computes.

    model: a folder, a hub id or a config.json; no weights are read or downloaded.
    """
    path = Path(model)
    if not path.is_file():
        path = hub.resolve(model, revision, weights=False) / CONFIG
    elif revision is not None:
        raise UsageError(f"{model} is a file and has no revision {revision}: drop --revision.")
    config = read_json(path)
    spec = arch_spec or specs.beside(path.parent, model_type_of(config))
    report = check(config, spec)
    warnings = [_BLIND] if report.pictures is False else []
    for message in warnings:
        console.warn(message)
    if as_json:
        console.print_json({"model": model, **_facts(report), "warnings": warnings})
    else:
        _show(model, report)
    return any(verdict.result == "wrong" for verdict in report.verdicts)


def _facts(report: Report) -> dict[str, Any]:
    return {
        "model_type": report.model_type,
        "layers": report.layers,
        "parameters": report.parameters,
        "pictures": report.pictures,
        "limit": LIMIT,
        "rotations": {
            verdict.rotation: {
                "verdict": verdict.result,
                "error": verdict.error,
                "reason": verdict.reason or None,
            }
            for verdict in report.verdicts
        },
    }


def _show(model: str, report: Report) -> None:
    shown = ", shown text and a picture" if report.pictures else ""
    console.line(
        f"{model}: {report.model_type}, a random twin of {report.layers} layers and "
        f"{report.parameters:,} parameters in float64{shown}"
    )
    for verdict in report.verdicts:
        console.line(f"  {verdict.rotation.upper()} {_said(verdict)}")


def _said(verdict: Verdict) -> str:
    if verdict.result == "refused":
        return f"is refused: {verdict.reason}"
    error = f"max |d logit| / max |logit| = {verdict.error:.1e}"
    if verdict.result == "holds":
        return f"holds: {error}"
    return (
        f"is WRONG: {error}, and a fold may reach {LIMIT:.0e}: the spec takes some tensor for what "
        f"it is not; do not use --rotate {verdict.rotation} until it is corrected."
    )
