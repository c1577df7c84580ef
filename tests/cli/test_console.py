"""Tables on narrow terminals and in files, and progress where nobody watches."""

import io

import pytest
from rich.console import Console

from nvfp4cli.cli import console

COLUMNS = ("tensor", "shape", "edits", "bytes")
ROWS = [
    ("model.layers.0.mlp.down_proj.weight", "64x128", "", 5124),
    ("model.norm.weight", 64, "", 9),
]


def shown(monkeypatch: pytest.MonkeyPatch, width: int) -> list[str]:
    screen = io.StringIO()
    monkeypatch.setattr(console, "stdout", Console(file=screen, width=width, force_terminal=False))
    console.table("Decisions", COLUMNS, ROWS)
    return screen.getvalue().splitlines()


def test_a_table_that_fits_is_drawn(monkeypatch):
    lines = shown(monkeypatch, 200)
    assert lines[0].strip() == "Decisions"
    (row,) = [line for line in lines if "down_proj" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        ROWS[0][0],
        "64x128",
        "",
        "5124",
    ]
    width = max(map(len, lines))
    assert shown(monkeypatch, width) == lines  # exactly as wide as the terminal
    assert len(shown(monkeypatch, width - 1)) == 3


def test_a_table_that_does_not_fit_is_a_line_for_each_row(monkeypatch):
    assert shown(monkeypatch, 40) == [
        "Decisions:",
        "  model.layers.0.mlp.down_proj.weight: shape 64x128, bytes 5124",
        "  model.norm.weight: shape 64, bytes 9",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "term", "disabled"),
    [
        (io.StringIO(), "xterm", True),  # FORCE_COLOR wants colours in a file, not a bar
        (Terminal(), "dumb", True),
        (Terminal(), "xterm", False),
    ],
)
def test_progress_needs_a_terminal_that_can_redraw(monkeypatch, file, term, disabled):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(console, "stderr", Console(file=file))
    assert console.progress_bar().disable is disabled
    assert console.counter().disable is disabled
