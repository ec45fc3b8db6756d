"""Tables of measurements, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from keras_towers.timeline.host import PARTS
from keras_towers.timeline.measured import Measured

# Of more towers only the slowest are shown.
_SHOWN = 16


def show(
    console: Console,
    title: str,
    measured: Measured,
    advice: Sequence[str],
) -> None:
    """Print the phases of a step, those of each tower, and advice."""
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    for line in _of_fit(measured):
        console.print(line, highlight=False, markup=False)
    if measured.phases:
        console.print(_phases(measured))
    if len(measured.names) > 1 and measured.of_towers:
        console.print(_towers(measured.names, measured.of_towers))
    for line in advice or ["nothing stands out."]:
        console.print(f"- {line}", highlight=False, markup=False)


def _of_fit(measured: Measured) -> Iterator[str]:
    for name, seconds in measured.seconds.items():
        if name == "steps":
            yield f"steps: {seconds:.2f} of {measured.whole:.2f} s of fit"
        elif seconds:
            what = f" ({PARTS[name]})" if PARTS[name] else ""
            yield f"{name}: {seconds:.2f} s{what}"


def _phases(measured: Measured) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("phase")
    table.add_column("mean ms", justify="right")
    table.add_column("median ms", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for name, mean in measured.phases.items():
        share = f"{measured.share(name):.0%}"
        median = _ms(measured.medians.get(name, mean))
        rare = "every so often" if measured.is_rare(name) else ""
        table.add_row(name, _ms(mean), median, share, rare)
    table.add_section()
    table.add_row("a step", _ms(measured.total))
    return table


def _towers(names: Sequence[str], towers: Mapping[str, np.ndarray]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("tower")
    shown = {n: v for n, v in towers.items() if not np.isnan(v).all()}
    for name in shown:
        table.add_column(f"{name} ms", justify="right")
    slowest = np.argsort(-next(iter(shown.values())))[:_SHOWN]
    for tower in sorted(int(index) for index in slowest):
        cells = [_ms(float(v[tower])) for v in shown.values()]
        table.add_row(names[tower], *cells)
    if len(names) > _SHOWN:
        table.caption = f"the slowest {_SHOWN} of {len(names)}"
    return table


def _ms(seconds: float) -> str:
    return "" if np.isnan(seconds) else f"{1e3 * seconds:.2f}"
