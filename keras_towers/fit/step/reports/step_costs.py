"""The costs of a step on towers: exchanges, and undivided computations.

``step_reports.py`` shows them to users; ``planning.py`` and ``network_cost.py``
compute with them.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.step.graph.code_lines import cause_of, line_of
from keras_towers.foundation.byte_sizes import format_bytes
from keras_towers.foundation.message_lists import listed
from keras_towers.partition.ir.axes import OF_MESSAGES, Axis
from keras_towers.partition.ir.estimated_work import work_of
from keras_towers.partition.ir.layouts import sizes_of
from keras_towers.partition.ir.program import Exchange, Program, Tensor
from keras_towers.partition.ir.sizes import (
    EXAMPLES,
    UNKNOWN,
    Dimension,
    Size,
    is_data_dependent,
    symbol,
    symbol_name,
)
from keras_towers.partition.timeline.gathers import gathered_bytes
from keras_towers.partition.timeline.memory_estimate import held_tensors
from keras_towers.partition.timeline.timeline import StepPlan, Timeline

# A smaller part of a step is only described, unless it grows with a batch.
_ANNOUNCED = 0.02
# How many lines that follow from one are named.
_NAMED = 4
_LENGTH = symbol("length")
_UNKNOWN_BYTES = "bytes that depend on the data"


@dataclasses.dataclass
class ComputedOnce:
    """Computations that one line of code makes run once for all towers.

    Attributes:
        reason: why the line is not divided.
        share: the fraction of what the step computes, estimated.
        grows: whether some of these operations grow with the batch.
        following: the lines that take its result, and are a part of the share.
            Some would be computed once without it, too.
    """

    reason: str
    share: float = 0
    grows: bool = False
    following: list[str] = dataclasses.field(default_factory=list)

    def describe(self, line: str) -> str:
        """Describe the computations, given their line."""
        share = f"{self.share:.1%} of the step"
        if self.following:
            lines = listed(self.following, _NAMED, separator="; ")
            share += f", with what follows: {lines}"
        return f"computed once for all towers: {line} ({self.reason}; {share})"


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of a step on towers.

    Attributes:
        exchanges: the number of exchanges.
        rounds: the number of rounds in which they take place.
        total: bytes exchanged per step, by what they are a multiple of: for
            each N, the number of examples, or other product of sizes that are
            not fixed; "": of nothing.
        has_unknown: whether more is exchanged, by the entries of a batch.
        held: the bytes per example that a tower with several micro-batches
            holds for all of them until an exchange is over, for each length, or
            product of lengths, that is not fixed; None: unknown.
        once: what is computed once for all towers, by line of code.
        gathered: the bytes of gathered weights that a tower has at a time.
        sent: the bytes that each tower, or rank, sends, and receives, if
            exchanges move as few as they can: rings do. By what they are a
            multiple of, as in ``total``.
        by_axes: the bytes exchanged, as in ``sent``, by the axes along which
            there are others: ``"columns"``, ``"towers and ranks"``, ...
        over_columns: how many of the exchanges are among the devices of each
            tower.
        replaced_sums: the bytes of the sums in place of which rows are
            gathered.
        plan: the memory that it takes, and what is computed again.
        how_it_fits: how it is made to fit into memory; empty: as it is.
        graph_bytes: what a process has for the graphs of the step: an estimate;
            0: they are not made yet.
        building_bytes: what it has for them at a time until the first step
            begins.
    """

    exchanges: int
    rounds: int
    total: dict[str, int]
    has_unknown: bool
    held: dict[str, int] | None
    once: dict[str, ComputedOnce]
    gathered: int
    sent: dict[str, int]
    by_axes: dict[str, dict[str, int]]
    over_columns: int
    replaced_sums: int
    plan: StepPlan = StepPlan()
    how_it_fits: str = ""
    graph_bytes: int = 0
    building_bytes: int = 0

    @property
    def remat_summary(self) -> str:
        """Describe what is recomputed; empty: nothing."""
        plan = self.plan
        if not plan.recomputed:
            return ""
        saved, most = map(format_bytes, (plan.saved, plan.bytes))
        return (
            f"computes {_count(plan.recomputed, 'operation')} again "
            f"({plan.work:.0%} of its work) instead of keeping {saved} on "
            f"each tower: {most} at a time"
        )

    @property
    def exchange_summary(self) -> str:
        """Describe the exchanges; N is the number of examples."""
        exchanges = _count(self.exchanges, "exchange")
        sizes = _describe_bytes(self.total, self.has_unknown)
        rounds = _count(self.rounds, "round")
        if self.over_columns:
            within = f"{self.over_columns} among the devices of a tower"
            rounds = f"{rounds} ({within})"
        return f"{exchanges} in {rounds}, {sizes}"

    @property
    def sent_summary(self) -> str:
        """Describe the bytes that each tower, or rank, sends and receives."""
        return _describe_bytes(self.sent, self.has_unknown)

    @property
    def axes_summary(self) -> str:
        """Describe the bytes exchanged along each set of axes; empty: one."""
        if len(self.by_axes) < 2:
            return ""
        return ", ".join(
            f"{' + '.join(_terms(sizes))} over {axes}"
            for axes, sizes in self.by_axes.items()
        )

    @property
    def held_summary(self) -> str:
        """Describe what a tower holds for all micro-batches; empty: nothing."""
        if self.held is None:
            return _UNKNOWN_BYTES
        terms = " + ".join(_terms(self.held))
        return f"{terms} per example" if terms else ""

    @property
    def once_summary(self) -> list[str]:
        """Describe the operations computed once, most expensive first."""
        return [self.once[line].describe(line) for line in self._lines]

    @property
    def announcement(self) -> str:
        """Describe the first computation worth a notice; empty if none is."""
        for line in self._lines:
            cost = self.once[line]
            if cost.share >= _ANNOUNCED or cost.grows:
                more = ", ..." if len(self.once) > 1 else ""
                return f"{cost.describe(line)}{more}"
        return ""

    @property
    def _lines(self) -> list[str]:
        return sorted(self.once, key=lambda line: -self.once[line].share)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """A tensor of an exchange.

    Attributes:
        level: its level.
        tensor: the tensor.
        sizes: the shape of what all contribute.
        is_sum: whether all get the sum, which is scattered and then gathered.
        over: the axes along which it is exchanged, the inner one first.
        groups: how many groups of them do so side by side, each a part.
    """

    level: int
    tensor: Tensor
    sizes: Sequence[Any]
    is_sum: bool
    over: Sequence[Axis] = ("towers", "ranks")
    groups: int = 1

    @property
    def size(self) -> Size | int | None:
        """The bytes; None if entries of the batch decide."""
        size: Any = math.prod(self.sizes, start=self.tensor.dtype.size)
        is_known = isinstance(size, (Size, int))
        return size if is_known and not is_data_dependent(size) else None


def exchanged_in(timeline: Timeline, towers: int) -> Iterator[Exchanged]:
    """Yield the tensors that a step exchanges.

    Args:
        timeline: when it does what.
        towers: the number of towers, or of their micro-batches.
    """
    for exchange in timeline.program.exchanges:
        if exchange.kind != "first":
            yield exchanged_by(exchange, towers, timeline.levels[exchange])


def exchanged_by(exchange: Exchange, towers: int, level: int) -> Exchanged:
    """Return the tensor, the sizes and the axes of an exchange of a level."""
    tensor, sizes = exchange.given, exchange.sizes
    axes: list[Axis] = [a for a in OF_MESSAGES if a in exchange.over]
    groups = 1
    if "columns" in axes:
        # Each tower exchanges the rows that it has of the batch.
        has_rows = not tensor.shape.is_fully_defined()
        groups = towers if has_rows else 1
        sizes = list(sizes or [UNKNOWN])
    elif sizes is None:
        times = 1 if exchange.kind == "sum" else towers
        sizes = [times, *_sizes(tensor)]
    else:
        rows = exchange.axis if exchange.kind == "gather" else None
        sizes = [
            towers if size is None else _length(size, axis == rows)
            for axis, size in enumerate(sizes)
        ]
    is_sum = exchange.kind == "sum"
    return Exchanged(level, tensor, sizes, is_sum, axes, groups)


def costs_of(
    timeline: Timeline,
    towers: int,
    senders: int | None = None,
    columns: int = 1,
) -> StepCosts:
    """Return the costs of a step.

    Args:
        timeline: when it does what.
        towers: the number of towers, or of their micro-batches.
        senders: the number of ranks that send to one another; None: towers do.
        columns: the number of devices of a tower, which send to one another.
    """
    of_ranks = senders is not None
    senders = senders or towers
    exchanged = [*exchanged_in(timeline, towers)]
    program = timeline.program
    total, has_unknown = total_of(exchanged)
    sent: collections.Counter[str] = collections.Counter()
    by_axes: dict[str, collections.Counter[str]] = {}
    here = towers // senders if of_ranks else towers
    others = [("columns", columns), ("towers", here), ("ranks", towers // here)]
    shared = {axis for axis, number in others if number > 1}
    for exchange in exchanged:
        if exchange.size is None:
            continue
        unit, number = _unit_and_number(exchange.size)
        axes = " and ".join(axis for axis in exchange.over if axis in shared)
        if axes:
            by_axes.setdefault(axes, collections.Counter())[unit] += number
        peers, parts = senders, 1
        if "columns" in exchange.over:
            peers = columns
        elif of_ranks and "ranks" not in exchange.over:
            # It stays within each process.
            peers = 1
        elif of_ranks and "columns" in exchange.tensor.axes:
            parts = columns
        number *= (2 if exchange.is_sum else 1) * (peers - 1) * parts
        sent[unit] += number // (peers * exchange.groups)
    rounds = len({exchange.level for exchange in exchanged})
    return StepCosts(
        exchanges=len(exchanged),
        rounds=rounds,
        total=total,
        has_unknown=has_unknown,
        held=_held_bytes(timeline),
        once=_once(program),
        gathered=max(gathered_bytes(timeline)),
        sent=dict(sorted(sent.items())),
        by_axes={k: dict(sorted(by_axes[k].items())) for k in sorted(by_axes)},
        over_columns=sum(
            "columns" in e.over and e.kind != "first" for e in program.exchanges
        ),
        replaced_sums=program.replaced_sums,
        plan=timeline.plan,
    )


def _sizes(tensor: Tensor) -> list[Dimension]:
    """Return the shape of a tensor, with ``UNKNOWN`` sizes."""
    if tensor.shape.rank is None:
        return [UNKNOWN]
    return list(sizes_of(tensor.shape))


def _length(size: Dimension, is_rows: bool) -> Dimension:
    """Return a size; an unknown one that counts no rows gets a symbol."""
    return _LENGTH if size is UNKNOWN and not is_rows else size


def total_of(exchanged: Iterable[Exchanged]) -> tuple[dict[str, int], bool]:
    """Return the bytes exchanged, and whether more depends on the data.

    The bytes are grouped by unit, as in ``StepCosts``; the unit "" is for
    constant ones.
    """
    sizes = [exchange.size for exchange in exchanged]
    total: collections.Counter[str] = collections.Counter()
    for size in sizes:
        if size is not None:
            unit, number = _unit_and_number(size)
            total[unit] += number
    return dict(sorted(total.items())), None in sizes


def describe_total(exchanged: Iterable[Exchanged]) -> str:
    """Describe the bytes exchanged; N is the number of examples."""
    total, has_unknown = total_of(exchanged)
    return _describe_bytes(total, has_unknown)


def _describe_bytes(total: Mapping[str, int], has_unknown: bool) -> str:
    sizes = _terms(total)
    if has_unknown:
        sizes.append(_UNKNOWN_BYTES)
    return " + ".join(sizes) or format_bytes(0)


def _unit_and_number(size: Size | int) -> tuple[str, int]:
    """Return the unit of a size, and its multiple."""
    if isinstance(size, int):
        return "", size
    example = symbol_name(EXAMPLES)
    names = [
        "N" if name == example else "length"
        for name, power in size.powers
        for _ in range(power)
    ]
    return " x ".join(sorted(names)), size.number


def _held_bytes(timeline: Timeline) -> dict[str, int] | None:
    """Return the bytes that towers hold between levels, as in ``StepCosts``."""
    total: collections.Counter[str] = collections.Counter()
    for tensor in held_tensors(timeline):
        if tensor.shape.rank is None:
            return None
        sizes = [size for size in tensor.shape if size is not None]
        # One of those that are not fixed is the number of examples.
        lengths = tensor.shape.rank - len(sizes) - 1
        if lengths >= 0:
            unit = " x ".join(["length"] * lengths)
            total[unit] += math.prod(sizes) * tensor.dtype.size
    return dict(sorted(total.items()))


def _once(program: Program) -> dict[str, ComputedOnce]:
    """Return what is computed once, by the line of code that causes it."""
    once: dict[str, ComputedOnce] = {}
    undivided = {id(o): why for o, why in program.computed_once.items()}
    if not undivided:
        return once
    # Several operations may stand for a traced one, which counts once.
    work = {o.source: 0.0 for o in program.operations if o.source is not None}
    work = {source: work_of(source) for source in work}
    counted: set[tf.Operation] = set()
    causes: dict[Tensor, str] = {}
    for operation in program.operations:
        cause = next((causes[t] for t in operation.inputs if t in causes), None)
        # Operations that use it take rows, too, as a loss takes targets.
        source = operation.source
        if cause is None and source is not None and id(source) in undivided:
            cause = cause_of(source)
            once.setdefault(cause, ComputedOnce(undivided[id(source)]))
        if cause is None or "towers" in operation.axes:
            continue
        causes.update(dict.fromkeys(operation.outputs, cause))
        if source is None:
            continue
        cost, line = once[cause], line_of(source)
        is_forward = line == cause_of(source)
        is_other = not cause.endswith(line) and line not in cost.following
        if is_forward and is_other:
            cost.following.append(line)
        if source not in counted:
            cost.share += work[source]
            counted.add(source)
        tensors = (*source.inputs, *source.outputs)
        if not all(t.shape.is_fully_defined() for t in tensors):
            cost.grows = True
    total = sum(work.values())
    for cost in once.values():
        cost.share /= total
    return {line: cost for line, cost in once.items() if cost.share}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _terms(numbers: Mapping[str, int]) -> list[str]:
    """Describe the bytes for each unit."""
    return [
        f"{format_bytes(number)}{unit and f' x {unit}'}"
        for unit, number in numbers.items()
        if number
    ]
