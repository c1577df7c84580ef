"""The command that compares ways to 4 bits: study."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvfp4cli.checkpoint import hub
from nvfp4cli.checkpoint.reader import open_checkpoint
from nvfp4cli.cli import console
from nvfp4cli.errors import RecipeError, UsageError
from nvfp4cli.kernels.threads import one_thread
from nvfp4cli.study import sawtooth, synthetic, weights
from nvfp4cli.study.methods import METHODS, METRIC, PLAIN, PLAIN_MXFP4, Method, rotations_of
from nvfp4cli.study.weights import WeightErrors

_SHOWN_WEIGHTS = 24  # more of them are shown by kinds
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_NO_FIT = "no fit"
_LEGEND = (
    "Hn: rows rotated by Hadamard matrices of n; QR16: by a random orthogonal one; 4/6: "
    "four-over-six block scales; MX: MXFP4."
)


@dataclass(frozen=True)
class Choice:
    """Which weights of a checkpoint to measure.

    limit: of each kind, None for as many as the budget allows. Raises UsageError for a pattern
    that is none.
    """

    tensors: tuple[str, ...] = ()
    limit: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        weights.check_patterns(self.tensors)


def study_draws(plot: Path | None, *, as_json: bool) -> None:
    """Errors of synthetic draws; the figure shows the sawtooth of MXFP4's scales."""
    check_plot(plot)
    tables = list(synthetic.tables())
    if plot is not None:
        from nvfp4cli.study.plot import save_sawtooth

        save_sawtooth(sawtooth.sweep(), plot)
    if as_json:
        console.print_json(
            {
                "metric": METRIC,
                "seed": synthetic.SEED,
                "methods": _described(METHODS),
                "tables": [
                    {"shape": [synthetic.ROWS, table.width], "errors": table.errors}
                    for table in tables
                ],
            }
        )
    else:
        for table in tables:
            title = f"{METRIC}, draws of {synthetic.ROWS} x {table.width}, seed {synthetic.SEED}"
            rows = ((case, *map(_figure, errors.values())) for case, errors in table.errors.items())
            console.table(_capital(title), ("case", *(m.label for m in table.methods)), rows)
        console.line(_LEGEND)
    _say_plotted(plot)


def study_weights(checkpoint: str, choice: Choice, plot: Path | None, *, as_json: bool) -> None:
    """Errors of the linear weights of a checkpoint; the figure shows them by layer."""
    check_plot(plot)
    source = open_checkpoint(hub.resolve(checkpoint, choice.revision))
    available = weights.candidates(source, checkpoint, choice.tensors)
    names = weights.spread(available, source, choice.limit)
    measured = []
    # torch's own threads would wait for each other after every operation of a few microseconds.
    with one_thread(), console.counter() as bar:
        task = bar.add_task("weights", total=len(names))
        for weight in weights.measure(source, names):
            measured.append(weight)
            bar.advance(task)
    if plot is not None:
        from nvfp4cli.study.plot import save_errors

        save_errors(measured, checkpoint, plot)
    if as_json:
        console.print_json(_facts(checkpoint, measured, len(available)))
    else:
        _show(checkpoint, measured, len(available))
    _say_plotted(plot)


def check_plot(path: Path | None) -> None:
    """Raise UsageError or RecipeError for a figure that could not be drawn, before any work."""
    if path is None:
        return
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise UsageError(f"--plot is {path}: give a name that ends in {', '.join(_PLOT_SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise RecipeError("--plot needs matplotlib: run pip install 'nvfp4cli[plots]'.")
    if path.is_dir() or not path.parent.is_dir():
        fault = "is a folder" if path.is_dir() else f"lies in no folder, {path.parent} is missing"
        raise RecipeError(f"--plot {path} {fault}: name a file in a folder that exists.")


def _say_plotted(plot: Path | None) -> None:
    if plot is not None:
        console.say(f"The figure is in {plot}.")


def _described(methods: Iterable[Method]) -> list[dict[str, Any]]:
    return [
        {"name": m.name, "label": m.label, "description": m.description, "width": m.width}
        for m in methods
    ]


def _facts(model: str, measured: Sequence[WeightErrors], available: int) -> dict[str, Any]:
    return {
        "checkpoint": model,
        "metric": METRIC,
        "methods": _described(METHODS),
        "available": available,
        "measured": len(measured),
        "values": sum(n * k for n, k in (weight.shape for weight in measured)),
        "tensors": [{**asdict(weight), "best": weight.best} for weight in measured],
        "kinds": [
            {"kind": kind, **_summary(members)} for kind, members in _by_kind(measured).items()
        ],
        "all": _summary(measured),
        "helped": {plain.name: _helped(measured, plain) for plain in (PLAIN, PLAIN_MXFP4)},
    }


def _summary(members: Sequence[WeightErrors]) -> dict[str, Any]:
    return {
        "weights": len(members),
        "mean_errors": weights.mean_errors(members),
        "best": weights.best_counts(members),
    }


def _by_kind(measured: Sequence[WeightErrors]) -> dict[str, list[WeightErrors]]:
    kinds: dict[str, list[WeightErrors]] = {}
    for weight in measured:
        kinds.setdefault(weight.kind, []).append(weight)
    return kinds


def _helped(measured: Sequence[WeightErrors], plain: Method) -> dict[str, dict[str, int]]:
    """Of how many weights each rotation lowers the error of a format, by method's name."""
    found = {}
    for method in rotations_of(plain):
        lower, fitting = weights.improved(measured, method, plain)
        found[method.name] = {"lower": lower, "of": fitting}
    return found


def _show(model: str, measured: Sequence[WeightErrors], available: int) -> None:
    labels = [method.label for method in METHODS]
    if len(measured) <= _SHOWN_WEIGHTS:
        rows = ((w.name, "x".join(map(str, w.shape)), *_figures(w.errors)) for w in measured)
        console.table(f"{_capital(METRIC)}, {model}", ("tensor", "shape", *labels), rows)
    summary = [
        (kind, len(members), *_figures(weights.mean_errors(members)))
        for kind, members in _by_kind(measured).items()
    ]
    summary.append(("all", len(measured), *_figures(weights.mean_errors(measured))))
    best = weights.best_counts(measured)
    summary.append(("best in", sum(best.values()), *best.values()))
    title = f"{_capital(METRIC)} of {model}, mean over the weights of a kind"
    console.table(title, ("kind", "weights", *labels), summary)
    if any(error is None for weight in measured for error in weight.errors.values()):
        console.line(f"{_NO_FIT}: the length of some rows is no multiple of the method's block.")
    console.line(_LEGEND)
    for plain in (PLAIN, PLAIN_MXFP4):
        counts = (weights.improved(measured, m, plain) for m in rotations_of(plain))
        listed = ", ".join(
            f"{m.label} {lower} of {fitting}"
            for m, (lower, fitting) in zip(rotations_of(plain), counts, strict=True)
            if fitting
        )
        if listed:
            console.line(f"Weights whose {plain.label} error a rotation lowers: {listed}.")
    if len(measured) < available:
        console.line(
            f"Measured {len(measured)} of {available} weights, spread over the layers: --limit "
            f"{available} measures all."
        )


def _figures(errors: Mapping[str, float | None]) -> list[str]:
    return [_NO_FIT if error is None else _figure(error) for error in errors.values()]


def _figure(error: float) -> str:
    return f"{error:.4f}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
