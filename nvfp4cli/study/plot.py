"""Figures of a study; the only module that imports matplotlib.

They must be readable in greyscale: a format has its own shade and dashes, a rotation its marker.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nvfp4cli.errors import CheckpointError
from nvfp4cli.study.methods import METHODS, METRIC, Method
from nvfp4cli.study.sawtooth import Sawtooth
from nvfp4cli.study.weights import WeightErrors

_STYLES: dict[str, dict[str, Any]] = {
    "NVFP4": {"color": "#123c69", "linestyle": "-"},
    "NVFP4 four-over-six": {"color": "#c1582b", "linestyle": "--"},
    "MXFP4": {"color": "#9aa5ad", "linestyle": "-."},
}
_MARKERS = {"": "o", "h16": "s", "h32": "^", "h64": "D", "h128": "v", "qr16": "x"}
_COLUMNS = 4  # panels in a row
_PANEL = (3.4, 2.7)  # inches
_DPI = 150


def save_sawtooth(sawtooth: Sawtooth, path: Path) -> None:
    """Error and use of the code range over the block's largest value, as `sawtooth.sweep` gives.

    Raises CheckpointError where the file cannot be written.
    """
    figure = Figure(figsize=(7.5, 6.5), layout="constrained")
    error, usage = figure.subplots(2, 1, sharex=True)
    for name, curve in sawtooth.curves.items():
        error.plot(sawtooth.maxima, curve.error, label=name, **_STYLES[name])
        usage.plot(sawtooth.maxima, curve.usage, label=name, **_STYLES[name])
    error.set_title("Blocks of Gaussian values, scaled to one largest value")
    error.set_ylabel(METRIC)
    usage.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="above: saturates")
    usage.set_ylabel("largest value / largest code")
    usage.set_xlabel("largest value of the block (octaves)")
    usage.set_xscale("log", base=2)
    for axes in (error, usage):
        axes.legend()
        axes.grid(alpha=0.3)
    _save(figure, path)


def save_errors(weights: Sequence[WeightErrors], model: str, path: Path) -> None:
    """One panel for each kind of weight: error by layer and method.

    Weights of one kind in one layer, experts say, are averaged. Raises CheckpointError where the
    file cannot be written.
    """
    kinds = list(dict.fromkeys(weight.kind for weight in weights))
    columns = min(_COLUMNS, len(kinds))
    rows = -(-len(kinds) // columns)
    # The legend is at least two panels wide.
    size = (_PANEL[0] * max(2, columns), _PANEL[1] * rows + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for kind, axes in zip(kinds, panels, strict=False):
        _draw_kind([weight for weight in weights if weight.kind == kind], axes)
        axes.set_title(kind)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5)
    figure.suptitle(f"{METRIC} of the linear weights of {model}")
    figure.supylabel(METRIC)
    _save(figure, path)


def _draw_kind(weights: Sequence[WeightErrors], axes: Axes) -> None:
    for method in METHODS:
        layers: dict[int, list[float]] = {}
        for weight in weights:
            error = weight.errors[method.name]
            if error is not None:
                layers.setdefault(weight.layer or 0, []).append(error)
        if layers:
            order = sorted(layers)
            means = [sum(layers[layer]) / len(layers[layer]) for layer in order]
            axes.plot(order, means, label=_label(method), **_style(method))
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _label(method: Method) -> str:
    family = method.format.name
    size = method.name.rpartition("-")[2] if method.rotation else ""
    return f"{family} {size.upper()}" if size else family


def _style(method: Method) -> dict[str, Any]:
    rotation = method.name.rpartition("-")[2] if method.rotation else ""
    # Hollow, since most curves of a format lie on each other.
    fill = "none" if rotation else "full"
    style = {"marker": _MARKERS[rotation], "markersize": 4, "linewidth": 0.8, "fillstyle": fill}
    return {**_STYLES[method.format.name], **style}


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}): choose another file with --plot."
        ) from None
