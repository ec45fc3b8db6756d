"""How numbers of the benchmark stand in its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from keras_towers.cli.bench_summary import Spread

NOTHING = "–"


def number(value: float) -> str:
    """Three digits of a number, or two."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def spread(values: Spread | None, before_range: str) -> str:
    """A median and, if there were several repeats, their range.

    Args:
        values: what was measured, if it was.
        before_range: what stands between the two.
    """
    if values is None:
        return NOTHING
    text = number(values.median)
    if values.low < values.high:
        low, high = number(values.low), number(values.high)
        text += f"{before_range}[dim]{low}–{high}[/]"
    return text


def epoch(cost_s: Spread | None) -> str:
    """Seconds, the median alone."""
    return f"{cost_s.median:.2f} s" if cost_s else NOTHING


def add_sections(
    table: Table, rows: Iterable[tuple[int, Sequence[str]]]
) -> None:
    """Add rows, of which those with one number stand together, below it.

    Args:
        table: its first column is for the number.
        rows: numbers, of towers or processes, each with the other cells.
    """
    before = None
    for count, cells in rows:
        if before not in (None, count):
            table.add_section()
        table.add_row("" if count == before else str(count), *cells)
        before = count
