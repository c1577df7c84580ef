"""What the figures show."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from nvfp4cli.errors import CheckpointError
from nvfp4cli.study import plot
from nvfp4cli.study.methods import METHODS
from nvfp4cli.study.sawtooth import Curve, Sawtooth
from nvfp4cli.study.weights import WeightErrors

SWEPT = Sawtooth(
    [1.0, 2.0, 4.0],
    {"NVFP4": Curve([0.1] * 3, [1.0] * 3), "MXFP4": Curve([0.1, 0.2, 0.1], [0.7, 1.3, 0.7])},
)


def weight(kind: str, layer: int | None, **errors: float | None) -> WeightErrors:
    by_name: dict[str, float | None] = dict.fromkeys((m.name for m in METHODS), 0.5)
    return WeightErrors(f"h.{layer}.{kind}", kind, layer, (16, 16), by_name | errors)


@pytest.fixture
def saved(monkeypatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: figures.append(figure))
    return figures


def test_the_sawtooth(saved):
    plot.save_sawtooth(SWEPT, Path("x.png"))
    error, usage = saved[0].axes
    assert [line.get_label() for line in error.lines] == ["NVFP4", "MXFP4"]
    assert list(error.lines[1].get_ydata()) == [0.1, 0.2, 0.1]
    assert list(usage.lines[1].get_ydata()) == [0.7, 1.3, 0.7]
    assert error.get_ylabel() == "relative L2 error"
    assert usage.get_xlabel() and usage.get_ylabel()
    assert usage.get_xscale() == "log"


def test_a_panel_for_each_kind(saved):
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    plot.save_errors([weight(k, n) for n in (0, 1) for k in kinds], "M", Path("x.png"))
    panels = [axes for axes in saved[0].axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == kinds
    for axes in panels:
        assert axes.get_xlabel() == "layer"
        assert len(axes.lines) == len(METHODS)
    (legend,) = saved[0].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == len(set(labels)) == len(METHODS)


def test_methods_are_told_apart_without_colours():
    looks = {
        (style["linestyle"], style["marker"], style["fillstyle"])
        for style in map(plot._style, METHODS)
    }
    assert len(looks) == len(METHODS)


def test_weights_of_a_layer_are_averaged_and_gaps_left_out(saved):
    experts = [weight("w1", 0, nvfp4=0.1), weight("w1", 0, nvfp4=0.3), weight("w1", 1, nvfp4=0.6)]
    missing = [weight("w1", 2, nvfp4=None)]
    plot.save_errors([*experts, *missing], "M", Path("x.png"))
    (axes,) = saved[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["NVFP4"].get_xdata()) == [0, 1]
    assert list(lines["NVFP4"].get_ydata()) == pytest.approx([0.2, 0.6])
    assert list(lines["MXFP4"].get_xdata()) == [0, 1, 2]


@pytest.mark.parametrize("name", ["figure.png", "figure.SVG", "figure.pdf"])
def test_files_are_written(tmp_path, name):
    plot.save_sawtooth(SWEPT, tmp_path / name)
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    path = tmp_path / name
    assert path.read_bytes().startswith(starts[path.suffix.lower()])
    plot.save_errors([weight("lm_head", None)], "M", path)


def test_a_file_that_cannot_be_written(tmp_path):
    path = tmp_path / "gone" / "figure.png"
    with pytest.raises(CheckpointError, match=r"cannot be written .*: choose another file with"):
        plot.save_sawtooth(SWEPT, path)
