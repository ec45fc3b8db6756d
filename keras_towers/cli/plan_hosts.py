"""The time of a step on several hosts, for ``plan``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from keras_towers.cli.plots import figure_in
from keras_towers.foundation.byte_sizes import format_bytes, parse_rate
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.object_types import JsonObject

if TYPE_CHECKING:
    from keras_towers.inspection.network_cost import StepTime
    from keras_towers.inspection.planning import Plan
    from keras_towers.partition.ir.axes import Axis

_MOST_DEVICES = 4096
# Between two hosts of a data center, and between two GPUs of a host.
_LATENCY_US = {"between": 30.0, "within": 5.0}
_TITLES: Mapping[Axis, str] = {
    "columns": "columns",
    "towers": "towers",
    "ranks": "hosts",
}


@dataclasses.dataclass(frozen=True)
class OnHosts:
    """A choice on a number of hosts.

    Attributes:
        plan: what it needs.
        devices: the number of devices.
        time: how long its step takes.
        fits: whether it fits; None: unknown.
    """

    plan: Plan
    devices: int
    time: StepTime
    fits: bool | None

    @property
    def examples_per_s(self) -> float | None:
        """The examples of a second; None: the computing time is not known."""
        if self.time.computing is None:
            return None
        return self.plan.examples / self.time.seconds

    def as_json(self) -> JsonObject:
        """Return it for other programs."""
        return {
            "hosts": self.plan.hosts,
            "devices": self.devices,
            "examples": self.plan.examples,
            "sending_ms": {a: 1e3 * s for a, s in self.time.sending.items()},
            "step_ms": 1e3 * self.time.seconds,
            "examples_per_s": self.examples_per_s,
            "efficiency": self.time.efficiency,
        }


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts, what connects them, and how fast they compute.

    Attributes:
        numbers: how many there may be, in ascending order.
        towers: the number of devices of each.
        between: the link of each host to others: bytes per second, and seconds
            of latency.
        within: the link of each device to others of its host.
        step_s: the seconds that a device computes in a step, if known.
    """

    numbers: Sequence[int]
    towers: int
    between: tuple[float, float]
    within: tuple[float, float]
    step_s: float | None

    @classmethod
    def of_options(
        cls,
        hosts: str | None,
        towers: int,
        between: str | None,
        within: str | None,
        step_ms: float | None,
    ) -> Hosts | None:
        """Check options of ``plan``; return None without ``--hosts``."""
        if hosts is None:
            for option, value in {
                "--link-between": between,
                "--link-within": within,
                "--step-ms": step_ms,
            }.items():
                if value is not None:
                    raise TowerError(
                        f"{option} is for several hosts: add --hosts"
                    )
            return None
        numbers = parse_hosts(hosts, towers)
        links = (
            parse_link("between", between, numbers[-1]),
            parse_link("within", within, towers),
        )
        if step_ms is not None and not 0 < step_ms < math.inf:
            raise TowerError(
                f"--step-ms {step_ms:g} is not allowed: give a number above 0"
            )
        step_s = None if step_ms is None else step_ms / 1e3
        return cls(numbers, towers, *links, step_s)

    def timed(self, plans: Iterable[Plan], memory: int | None) -> list[OnHosts]:
        """Return plans with the time of their steps.

        Args:
            plans: the plans.
            memory: the bytes of a device, if given.
        """
        from keras_towers.inspection.network_cost import Ring, time_step

        rows = []
        for plan in plans:
            axes: Mapping[Axis, Ring] = {
                "columns": Ring(plan.columns, *self.within),
                "towers": Ring(self.towers // plan.columns, *self.within),
                "ranks": Ring(plan.hosts, *self.between),
            }
            time = time_step(
                plan.exchanged, axes, plan.examples, plan.work, self.step_s
            )
            devices = plan.hosts * self.towers
            rows.append(OnHosts(plan, devices, time, plan.fits(memory)))
        return sorted(rows, key=lambda row: row.plan.hosts)


def parse_hosts(text: str, towers: int) -> list[int]:
    """Return numbers of hosts, such as those of 1,2,...,64.

    Args:
        text: numbers in ascending order. Three dots double the number before
            them, up to the one after them.
        towers: the number of devices of each host.
    """
    if not re.fullmatch(r"[1-9]\d*(,(\.\.\.,)?[1-9]\d*)*", text):
        raise _not_hosts(text)
    hosts = [0]
    for dots, digits in re.findall(r"(\.\.\.,)?(\d+)", text):
        number = int(digits)
        while dots and 2 * hosts[-1] < number:
            hosts.append(2 * hosts[-1])
        is_next = number == 2 * hosts[-1] if dots else number > hosts[-1]
        if not is_next:
            raise _not_hosts(text)
        hosts.append(number)
    if hosts[-1] * towers > _MOST_DEVICES:
        raise TowerError(
            f"--hosts {text} with --towers {towers} is not allowed: these are "
            f"{hosts[-1] * towers:,} devices, and a plan takes up to "
            f"{_MOST_DEVICES:,}"
        )
    return hosts[1:]


def _not_hosts(text: str) -> TowerError:
    return TowerError(
        f"--hosts {text} is not allowed: give numbers of hosts in ascending "
        "order, such as 1,2,3 or 1,2,...,64, where three dots double the "
        "number before them until they reach the next"
    )


def parse_link(
    name: str, text: str | None, members: int
) -> tuple[float, float]:
    """Return the bytes per second of a link, and its latency in seconds.

    Args:
        name: "between" hosts, or "within" them.
        text: a rate, alone or with a latency: 100Gbit or 100Gbit,20us.
        members: how many it connects at most; one needs none.
    """
    if text is None:
        if members > 1:
            what = "hosts" if name == "between" else "the devices of a host"
            raise TowerError(
                f"--hosts needs --link-{name}: the rate between {what}, such "
                "as 100Gbit or 300GB/s"
            )
        return math.inf, 0.0
    given = f"--link-{name} {text}"
    rate, comma, latency = text.partition(",")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*us", latency)
    if comma and found is None:
        raise TowerError(
            f"{given} is not allowed: give the latency in microseconds, such "
            "as 100Gbit,20us"
        )
    microseconds = float(found[1]) if found else _LATENCY_US[name]
    return parse_rate(given, rate), 1e-6 * microseconds


def table_of(rows: Sequence[OnHosts], device_memory: str | None) -> Table:
    """Return a table with a section for each number of hosts."""
    axes: list[Axis] = [
        axis for axis in _TITLES if any(r.time.sending.get(axis) for r in rows)
    ]
    is_timed = rows[0].time.computing is not None
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    table.add_column("hosts", justify="right")
    table.add_column("choice", no_wrap=True)
    titles = [f"ms,\n{_TITLES[axis]}" for axis in axes]
    if is_timed:
        titles += ["ms,\nstep", "examples\n/s", "effi-\nciency"]
    titles.append("on a\ndevice")
    if device_memory is not None:
        titles.append(f"fits\n{device_memory}")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    # Rows that stand alone need no blank lines.
    is_grouped = len({row.plan.hosts for row in rows}) < len(rows)
    for row, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        is_last = is_grouped and row.plan.hosts != after.plan.hosts
        cells = _cells(row, axes, device_memory is not None)
        table.add_row(*cells, end_section=is_last)
    return table


def _cells(
    row: OnHosts, axes: Iterable[Axis], has_memory: bool
) -> Iterator[str]:
    plan, time = row.plan, row.time
    yield from (f"{plan.hosts:,}", plan.choice)
    for axis in axes:
        yield f"{1e3 * time.sending.get(axis, 0):,.1f}"
    if row.examples_per_s is not None:
        yield f"{1e3 * time.seconds:,.1f}"
        yield f"{row.examples_per_s:,.0f}"
        yield f"{time.efficiency:.0%}"
    yield "unknown" if plan.total is None else format_bytes(plan.total)
    if has_memory:
        yield {True: "yes", False: "no", None: "unknown"}[row.fits]


def verdict(rows: Sequence[OnHosts]) -> str:
    """Return which choice to take, on which numbers of hosts.

    The fastest of those that fit, and of equally fast ones the first, as each
    needs more exchanges than the one before. Numbers of hosts on which none
    fits are left out.
    """
    best: dict[int, OnHosts] = {}
    for hosts, group in groupby(rows, key=lambda row: row.plan.hosts):
        if fitting := [row for row in group if row.fits is not False]:
            best[hosts] = min(fitting, key=lambda r: round(r.time.seconds, 9))
    if not best:
        return "None fits: use more hosts, or devices with more memory"
    parts = []
    for choice, of_choice in groupby(best, key=lambda n: best[n].plan.choice):
        first, *others = of_choice
        where = f"{first} to {others[-1]}" if others else f"{first}"
        parts.append(f"{choice} on {where} host{'' if where == '1' else 's'}")
    line = f"Take {', '.join(parts)}"
    last = [*best.values()][-1]
    number = last.plan.hosts
    hosts = f"on {number} host{'' if number == 1 else 's'}"
    if last.examples_per_s is None:
        sending = 1e3 * sum(last.time.sending.values())
        return f"{line}: exchanges take {sending:,.1f} ms of a step {hosts}"
    return (
        f"{line}: {last.examples_per_s:,.0f} examples/s {hosts}, "
        f"{last.time.efficiency:.0%} of what its devices compute"
    )


def draw_curve(rows: Sequence[OnHosts], path: Path) -> None:
    """Draw the examples per second of each choice by the number of hosts."""
    numbers = sorted({row.plan.hosts for row in rows})
    one = rows[0]
    assert one.time.computing is not None, "a curve without times"
    each = one.plan.examples / one.plan.hosts / one.time.computing
    choices = dict.fromkeys(row.plan.choice for row in rows)
    with figure_in(path, height=4.5) as figure:
        axes = figure.subplots()
        axes.plot(numbers, [each * n for n in numbers], "k:", label="computing")
        for index, choice in enumerate(choices):
            own = [row for row in rows if row.plan.choice == choice]
            too_large = [row for row in own if row.fits is False]
            fitting = [row for row in own if row.fits is not False]
            for style, shown in (("o", fitting), ("x", too_large), ("", own)):
                axes.plot(
                    [row.plan.hosts for row in shown],
                    [row.examples_per_s or 0 for row in shown],
                    f"C{index}{style}",
                    label="" if style else choice,
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(numbers, [f"{n}" for n in numbers])
        axes.set_xlabel(f"hosts of {one.devices // one.plan.hosts} devices")
        axes.set_ylabel("examples per second (x: does not fit)")
        axes.legend()
