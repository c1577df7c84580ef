"""What people and programs see: stdout is data, stderr is talk."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

_MANY_ROWS = 500
_UNBOUNDED = 10_000  # columns, more than any table has

# Written to a file or a pipe, tables are as wide as they need to be.
stdout = Console(width=None if sys.stdout.isatty() else _UNBOUNDED)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout. NaN and infinities, which JSON lacks, become null."""
    json.dump(_finite(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def line(text: str) -> None:
    """A line of the result, on stdout, never wrapped so that it can be copied."""
    stdout.print(text, markup=False, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """A line for people, on stderr."""
    stderr.print(message, markup=False)


def warn(message: str) -> None:
    """A warning, on stderr."""
    stderr.print("[yellow]warning:[/yellow] ", end="")
    stderr.print(message, markup=False)


def error(message: str) -> None:
    """The one sentence of a failed command, on stderr."""
    stderr.print("[red]error:[/red] ", end="")
    stderr.print(" ".join(message.split()), markup=False)  # a YAML error has several lines


def progress_bar() -> Progress:
    """Bytes done, speed and time left, on stderr; silent where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description:>12}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not _animated(),
    )


def _animated() -> bool:
    """FORCE_COLOR makes rich take a file for a terminal, but only for colours."""
    return stderr.is_interactive and stderr.file.isatty()


def counter() -> Progress:
    """A bar for things that are counted, on stderr; silent where stderr is no terminal."""
    return Progress(
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not _animated(),
    )


def facts(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Named values, one in a line, on stdout."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), Text(value))
    stdout.print(Text(title, style="bold"))
    stdout.print(grid)


def table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """A table on stdout; numbers are aligned to the right.

    On a terminal too narrow for it every row is a line: folded cells could not be read or copied.
    So it is with very many rows, which take rich milliseconds each.
    """
    kept = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *kept, strict=True)]
    if len(kept) > _MANY_ROWS or sum(widths) + 3 * len(columns) + 1 > stdout.width:
        lines = [f"{title}:"]
        for name, *cells in kept:
            pairs = zip(columns[1:], cells, strict=True)
            lines.append(f"  {name}: " + ", ".join(f"{c} {cell}" for c, cell in pairs if cell))
        line("\n".join(lines))
        return
    drawn = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        numeric = bool(kept) and all(_numeric(row[i]) for row in kept)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in kept:
        drawn.add_row(*row)
    stdout.print(drawn)


def size(nbytes: float) -> str:
    """Bytes for people, in powers of ten as disks and model cards count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "-." or cell == "nan"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
