"""The costs of a step on towers: exchanges, and undivided computations."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keras_towers._bytes import format_bytes
from keras_towers.fit.step.trace import cause_of, line_of
from keras_towers.partition.gathers import gathered_bytes
from keras_towers.partition.layouts import sizes_of
from keras_towers.partition.lifetimes import held_tensors
from keras_towers.partition.program import (
    Axis,
    Exchange,
    Program,
    Tensor,
)
from keras_towers.partition.sizes import (
    EXAMPLES,
    UNKNOWN,
    Dimension,
    Size,
    is_data_dependent,
    symbol,
    symbol_name,
)

# What takes less of a step is only described, if it does not grow with a batch.
_ANNOUNCED = 0.02
# How many lines that follow from one are named.
_NAMED = 4
_LENGTH = symbol("length")
_UNKNOWN_BYTES = "bytes that depend on the data"


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The costs of a step on towers.

    Attributes:
        exchanges: the number of exchanges.
        rounds: the number of rounds in which they take place.
        fixed: bytes exchanged per step, whatever the batch.
        per_unit: bytes exchanged for each N, the number of examples, or other
            product of sizes that are not fixed.
        has_unknown: whether more is exchanged, by the entries of a batch.
        held: the bytes per example that a tower with several micro-batches
            holds for all of them until an exchange is over, for each length, or
            product of lengths, that is not fixed; None: unknown.
        once: by line of code: the fraction of the step's operations that are
            computed once for all towers because of it.
        growing: the lines of these whose operations grow with the batch.
        following: by line: the lines that take its result, and are a part of
            its fraction. Some would be computed once without it, too.
        gathered: the bytes of gathered weights that a tower has at a time.
        sent: the bytes that each tower, or rank, sends, and receives, if
            exchanges move as few as they can: rings do. By what they are a
            multiple of, as in ``per_unit``; "": of nothing.
        by_axes: the bytes exchanged, as in ``sent``, by the axes along which
            there are others: ``"columns"``, ``"towers and ranks"``, ...
        over_columns: how many of the exchanges are among the devices of each
            tower.
        replaced_sums: the bytes of the sums in place of which rows are
            gathered.
        reasons: by line of ``once``: why it is not divided.
    """

    exchanges: int
    rounds: int
    fixed: int
    per_unit: dict[str, int]
    has_unknown: bool
    held: dict[str, int] | None
    once: dict[str, float]
    growing: frozenset[str]
    following: dict[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )
    gathered: int = 0
    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    by_axes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    over_columns: int = 0
    replaced_sums: int = 0
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def exchange_summary(self) -> str:
        """Describe the exchanges; N is the number of examples."""
        exchanges = _count(self.exchanges, "exchange")
        sizes = _terms(self.per_unit) + [_UNKNOWN_BYTES] * self.has_unknown
        if self.fixed or not sizes:
            sizes.insert(0, format_bytes(self.fixed))
        rounds = _count(self.rounds, "round")
        if self.over_columns:
            within = f"{self.over_columns} among the devices of a tower"
            rounds = f"{rounds} ({within})"
        return f"{exchanges} in {rounds}, {' + '.join(sizes)}"

    @property
    def sent_summary(self) -> str:
        """Describe what each tower, or rank, sends, and receives."""
        return _describe_bytes(self.sent, self.has_unknown)

    @property
    def axes_summary(self) -> str:
        """Describe what is exchanged along which axes; empty: all along one."""
        if len(self.by_axes) < 2:
            return ""
        return ", ".join(
            f"{' + '.join(_terms(sizes))} over {axes}"
            for axes, sizes in self.by_axes.items()
        )

    @property
    def held_summary(self) -> str:
        """Describe what a tower holds for all micro-batches; may be empty."""
        if self.held is None:
            return _UNKNOWN_BYTES
        terms = " + ".join(_terms(self.held))
        return f"{terms} per example" if terms else ""

    @property
    def once_summary(self) -> list[str]:
        """Describe the operations computed once, most expensive first."""
        return list(map(self._describe_once, self._lines))

    @property
    def announcement(self) -> str:
        """Describe the first of them that is worth it; empty: none is."""
        for line in self._lines:
            if self.once[line] >= _ANNOUNCED or line in self.growing:
                more = ", ..." if len(self.once) > 1 else ""
                return f"{self._describe_once(line)}{more}"
        return ""

    @property
    def _lines(self) -> list[str]:
        return sorted(self.once, key=lambda line: -self.once[line])

    def _describe_once(self, line: str) -> str:
        share = f"{self.once[line]:.1%} of the step"
        following = self.following.get(line, ())
        if following:
            more = len(following) - _NAMED
            named = list(following[:_NAMED])
            named += [f"{more} more"] if more > 0 else []
            share += f", with what follows: {'; '.join(named)}"
        why = f"{self.reasons[line]}; " if line in self.reasons else ""
        return f"computed once for all towers: {line} ({why}{share})"


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """What is exchanged at a time.

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
        """Its bytes; None: the entries of a batch decide."""
        size: Any = math.prod(self.sizes, start=self.tensor.dtype.size)
        is_known = isinstance(size, (Size, int))
        return size if is_known and not is_data_dependent(size) else None


def exchanged_in(program: Program, towers: int) -> Iterator[Exchanged]:
    """Yield what a program exchanges.

    Args:
        program: the program.
        towers: the number of towers, or of their micro-batches.
    """
    for exchange in program.exchanges:
        if exchange.kind != "first":
            yield exchanged_by(exchange, towers)


def exchanged_by(exchange: Exchange, towers: int) -> Exchanged:
    """Return what an exchange moves; as for ``exchanged_in``."""
    tensor, sizes, axes = exchange.given, exchange.sizes, exchange.over
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
    return Exchanged(exchange.level, tensor, sizes, is_sum, axes, groups)


def costs_of(
    program: Program, towers: int, senders: int | None = None, columns: int = 1
) -> StepCosts:
    """Return the costs of a program.

    Args:
        program: the program.
        towers: the number of towers, or of their micro-batches.
        senders: the number of ranks that send to one another; None: towers do.
        columns: the number of devices of a tower, which send to one another.
    """
    of_ranks = senders is not None
    senders = senders or towers
    exchanged = [*exchanged_in(program, towers)]
    per_unit, has_unknown = total_of(exchanged)
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
        elif of_ranks and exchange.tensor.on_columns:
            parts = columns
        number *= (2 if exchange.is_sum else 1) * (peers - 1) * parts
        sent[unit] += number // (peers * exchange.groups)
    once, growing, following, reasons = _once(program)
    rounds = len({exchange.level for exchange in exchanged})
    fixed = per_unit.pop("", 0)
    return StepCosts(
        exchanges=len(exchanged),
        rounds=rounds,
        fixed=fixed,
        per_unit=per_unit,
        has_unknown=has_unknown,
        held=_held_bytes(program),
        once=once,
        growing=growing,
        following=following,
        gathered=max(gathered_bytes(program)),
        sent=dict(sorted(sent.items())),
        by_axes={k: dict(sorted(by_axes[k].items())) for k in sorted(by_axes)},
        over_columns=sum(
            "columns" in e.over and e.kind != "first" for e in program.exchanges
        ),
        replaced_sums=program.replaced_sums,
        reasons=reasons,
    )


def _sizes(tensor: Tensor) -> list[Dimension]:
    """Return the shape of a tensor, with ``UNKNOWN`` sizes."""
    if tensor.shape.rank is None:
        return [UNKNOWN]
    return list(sizes_of(tensor.shape))


def _length(size: Dimension, is_rows: bool) -> Dimension:
    """Return a size; an unknown one of no rows is a length of its own."""
    return _LENGTH if size is UNKNOWN and not is_rows else size


def total_of(exchanged: Iterable[Exchanged]) -> tuple[dict[str, int], bool]:
    """Return the bytes exchanged, and whether more depends on the data.

    The bytes are by what they are a multiple of, as in ``StepCosts``; "": of
    nothing.
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
    """Return the name of what a size is a multiple of, and how many times."""
    if isinstance(size, int):
        return "", size
    example = symbol_name(EXAMPLES)
    names = [
        "N" if name == example else "length"
        for name, power in size.powers
        for _ in range(power)
    ]
    return " x ".join(sorted(names)), size.number


def _held_bytes(program: Program) -> dict[str, int] | None:
    """Return what towers hold from level to level, as in ``StepCosts``."""
    total: collections.Counter[str] = collections.Counter()
    for tensor in held_tensors(program):
        if tensor.shape.rank is None:
            return None
        sizes = [size for size in tensor.shape if size is not None]
        # One of those that are not fixed is the number of examples.
        lengths = tensor.shape.rank - len(sizes) - 1
        if lengths >= 0:
            unit = " x ".join(["length"] * lengths)
            total[unit] += math.prod(sizes) * tensor.dtype.size
    return dict(sorted(total.items()))


def _once(
    program: Program,
) -> tuple[
    dict[str, float],
    frozenset[str],
    dict[str, tuple[str, ...]],
    dict[str, str],
]:
    """Return ``once``, ``growing``, ``following`` and ``reasons``."""
    following: dict[str, dict[str, None]] = {}
    undivided = {id(o): why for o, why in program.computed_once.items()}
    reasons: dict[str, str] = {}
    causes: dict[Tensor, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    growing = set()
    for operation in program.operations:
        cause = next((causes[t] for t in operation.inputs if t in causes), None)
        # What follows from it takes rows, too, as a loss takes targets.
        source = operation.source
        if cause is None and source is not None and id(source) in undivided:
            cause = cause_of(source)
            reasons.setdefault(cause, undivided[id(source)])
        if cause is not None and not operation.on_towers:
            causes.update(dict.fromkeys(operation.outputs, cause))
            source = operation.source
            if source is None:
                continue
            line = line_of(source)
            is_forward = line == cause_of(source)
            if is_forward and not cause.endswith(line):
                following.setdefault(cause, {})[line] = None
            counts[cause] += 1
            tensors = (*source.inputs, *source.outputs)
            if not all(t.shape.is_fully_defined() for t in tensors):
                growing.add(cause)
    total = sum(len(graph.get_operations()) for graph in program.graphs)
    shares = {line: count / total for line, count in counts.items()}
    others = {line: tuple(lines) for line, lines in following.items()}
    return shares, frozenset(growing), others, reasons


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _terms(numbers: Mapping[str, int]) -> list[str]:
    """Describe numbers of bytes for each of some units; "": of no unit."""
    return [
        f"{format_bytes(number)}{unit and f' x {unit}'}"
        for unit, number in numbers.items()
    ]
