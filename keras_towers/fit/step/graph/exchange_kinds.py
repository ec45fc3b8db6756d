"""Exchanges of a step: among the towers of a process, then among processes.

``tower_program.py`` calls ``exchange_tensors``. The sums themselves are in
``reduction/`` and ``transport/``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_towers.fit.components import ApplyCall
from keras_towers.fit.ranks.step_order import row_of_rank
from keras_towers.fit.step.graph import step_clock
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights.shards import share_counts
from keras_towers.partition.ir.program import Exchange, ExchangeKind
from keras_towers.reduction.collectives import Collectives
from keras_towers.reduction.rank_sum import sum_over_ranks
from keras_towers.transport import Transport, messages, next_key
from keras_towers.transport.messages import Rows


class GradientExchange:
    """Sums gradients in a step as the strategy does.

    Args:
        update: adds them up.
        gradients: by the names of their tensors in the trace: the call of the
            optimizer, and the weight.
    """

    def __init__(
        self,
        update: WeightUpdate,
        gradients: Mapping[str, tuple[ApplyCall, Any]],
    ):
        self._update, self._gradients = update, gradients

    def collectives_for(self, exchange: Exchange) -> Collectives:
        """Return the collectives that sum a gradient over towers."""
        _, weight = self._gradients[exchange.gradient]
        return self._update.collectives_for(weight)

    def over_ranks(self, members: Sequence[Members]) -> None:
        """Sum this rank's gradients, or their rows, over ranks."""
        by_optimizer: dict[int, list[Members]] = {}
        for group in members:
            call, _ = self._gradients[group.exchange.gradient]
            by_optimizer.setdefault(id(call.optimizer), []).append(group)
        for groups in by_optimizer.values():
            of = [self._gradients[g.exchange.gradient] for g in groups]
            call, _ = of[0]
            assert self._update.rank_sum is not None
            totals = self._update.rank_sum.sum(
                call.optimizer,
                [weight for _, weight in of],
                [group.result for group in groups],
            )
            for group, total in zip(groups, totals, strict=True):
                group.result = total


@dataclasses.dataclass(eq=False)
class Members:
    """The members of an exchange in this process: towers, or columns.

    Attributes:
        exchange: the exchange.
        devices: the devices of K members.
        values: their tensors, one or several of each; None if only the first
            process has one.
        rows: for each taker that gets rows of the result, the first of them
            and their number.
        takers: who gets the result of each member, or that of all; of rows
            several takers may be on each device.
        goes_on: whether they exchange with other processes afterwards.
        result: the result, as far as it is exchanged; a list if each member has
            its own.
    """

    exchange: Exchange
    devices: Sequence[str]
    values: Sequence[Any]
    rows: Sequence[Sequence[Any]] = ()
    takers: Sequence[Any] = ()
    goes_on: bool = False
    result: Any = None

    @property
    def have_own(self) -> bool:
        """Whether each member in this process gets a result of its own."""
        return self.exchange.is_own and not self.goes_on

    @property
    def takes_part(self) -> bool:
        """Whether the members take rows, and other ranks the other rows."""
        exchange = self.exchange
        takes = exchange.result.axes - exchange.given.axes
        return exchange.kind == "scatter" and "ranks" in takes


def exchange_tensors(
    members: Sequence[Members],
    collectives: Collectives,
    transport: Transport,
    in_order: Callable[[Sequence[Any], Callable[..., list[Any]]], list[Any]],
    gradients: GradientExchange | None = None,
) -> list[Any]:
    """Exchange tensors among towers and columns, and then among processes.

    Args:
        members: those of this process in each of N exchanges.
        collectives: exchange tensors among them.
        transport: connects the processes.
        in_order: as ``StepOrder.exchange``.
        gradients: adds gradients up; None: as anything else is.

    Returns:
        The result of each exchange; a list of results if each member has its
        own.
    """
    for group in members:
        group.goes_on = transport.size > 1 and "ranks" in group.exchange.over
    _exchange_here(members, collectives, gradients)
    over_ranks = [group for group in members if group.goes_on]
    if over_ranks:
        exchange = functools.partial(
            _exchange_over_ranks, over_ranks, transport, gradients
        )
        with tf.device(members[0].devices[0]):
            in_order([group.result for group in over_ranks], exchange)
        _broadcast(over_ranks, collectives)
    _mark_gradients(members)
    return [group.result for group in members]


def _mark_gradients(members: Sequence[Members]) -> None:
    """Mark when towers have their gradients, and when the sums are there."""
    exchanged = [
        group
        for group in members
        if group.exchange.gradient and "towers" in group.exchange.over
    ]
    for tower in range(len(exchanged[0].devices) if exchanged else 0):
        computed = [group.values[tower] for group in exchanged]
        step_clock.reached(tower, "computed", computed)
        reduced = [
            group.result[tower] if group.exchange.is_own else group.result
            for group in exchanged
            if group.exchange.is_own or tower == 0
        ]
        if reduced:
            step_clock.reached(tower, "reduced", reduced)


# ---- in this process ---------------------------------------------------------


def _exchange_here(
    members: Sequence[Members],
    collectives: Collectives,
    gradients: GradientExchange | None,
) -> None:
    """Exchange tensors among the members of this process."""
    together: dict[Any, list[Members]] = {}
    for group in members:
        exchange = group.exchange
        kind: ExchangeKind = exchange.kind
        if group.goes_on and kind == "scatter":
            kind = "sum"
        if kind in ("sum", "scatter") or (kind == "gather" and group.have_own):
            carrier = collectives
            if gradients and exchange.gradient and "towers" in exchange.over:
                carrier = gradients.collectives_for(exchange)
            key = kind, tuple(group.devices), carrier
            together.setdefault(key, []).append(group)
        else:
            with tf.device(group.devices[0]):
                group.result = _on_one_device(group)
    for (kind, devices, carrier), groups in together.items():
        results = _exchange_together(kind, groups, devices, carrier)
        for group, result in zip(groups, results, strict=True):
            group.result = result if group.have_own else result[0]


def _broadcast(members: Sequence[Members], collectives: Collectives) -> None:
    """Give every member the result that ranks have computed together."""
    together: dict[tuple[str, ...], list[Members]] = {}
    for group in members:
        is_whole = group.exchange.kind in ("sum", "gather")
        if is_whole and group.exchange.is_own:
            together.setdefault(tuple(group.devices), []).append(group)
    for devices, groups in together.items():
        copies = collectives.broadcast([g.result for g in groups], devices)
        for group, *of_devices in zip(groups, *copies, strict=True):
            group.result = of_devices


def _on_one_device(members: Members) -> Any:
    """Exchange on the first member's device, without collectives."""
    values = list(members.values)
    match members.exchange.kind:
        case "gather":
            return tf.concat(values, members.exchange.axis)
        case "before":
            nothing = tf.zeros_like(values[0])
            before = itertools.accumulate(values, initial=nothing)
            return [*before] if members.goes_on else [*before][:-1]
        case _:
            return values[0]


def _exchange_together(
    kind: ExchangeKind,
    groups: Sequence[Members],
    devices: Sequence[str],
    collectives: Collectives,
) -> list[list[Any]]:
    """Exchange N tensors among devices; return each tensor's results."""
    tensors: list[list[Any]] = [[] for _ in devices]
    for group in groups:
        for own, value in zip(tensors, _of_devices(group), strict=True):
            own.append(value)
    match kind:
        case "sum":
            exchanged = collectives.all_reduce(tensors, devices)
        case "gather":
            rows = list(map(_rows_here, groups))
            exchanged = collectives.all_gather(tensors, devices, rows)
        case _:
            rows = list(map(_rows_here, groups))
            exchanged = collectives.reduce_scatter(tensors, devices, rows)
    results = list(map(list, zip(*exchanged, strict=True)))
    if kind == "scatter":
        return list(map(_of_takers, groups, results))
    return results


def _of_devices(members: Members) -> list[Any]:
    """Return one tensor for each device, which may have several members."""
    parts = len(members.values) // len(members.devices)
    if members.takes_part:
        return _rows_of_process(members)
    if parts == 1:
        return list(members.values)
    wholes = []
    for k, device in enumerate(members.devices):
        with tf.device(device):
            own = members.values[k * parts :][:parts]
            wholes.append(tf.concat(own, members.exchange.axis))
    return wholes


def _rows_of_process(members: Members) -> list[Any]:
    """Return each device's values of the rows that this process takes."""
    axis, (first, _) = members.exchange.axis, members.rows[0]
    number = tf.add_n([count for _, count in members.rows])
    results = []
    for device, value in zip(members.devices, members.values, strict=True):
        with tf.device(device):
            results.append(_rows_of(value, axis, first, number))
    return results


def _rows_of(value: Any, axis: int, first: Any, number: Any) -> Any:
    """Return rows of a tensor along an axis."""
    begin: list[Any] = [0] * value.shape.rank
    size: list[Any] = [-1] * value.shape.rank
    begin[axis], size[axis] = first, number
    return tf.slice(value, begin, size)


def _rows_here(members: Members) -> Rows:
    """Return the rows that devices have of a whole, or get of a sum."""
    axis, number = members.exchange.axis, len(members.devices)
    known = _RowsOfRanks.of(members, 1)
    if known is not None:
        return Rows(axis, known.counts[0])
    if members.exchange.kind == "gather":
        sizes = [value.shape[axis] for value in members.values]
        return Rows(axis, sizes if len(sizes) == number else ())
    counts = [count for _, count in members.rows]
    parts = len(counts) // number
    if parts == 1:
        return Rows(axis, counts)
    of_devices = [counts[k:][:parts] for k in range(0, len(counts), parts)]
    return Rows(axis, list(map(tf.add_n, of_devices)))


def _of_takers(members: Members, of_devices: Sequence[Any]) -> list[Any]:
    """Return the rows of each member, of which a device may have several."""
    counts = [count for _, count in members.rows]
    parts = len(counts) // len(members.devices)
    if parts == 1:
        return list(of_devices)
    results: list[Any] = []
    for k, (device, own) in enumerate(
        zip(members.devices, of_devices, strict=True)
    ):
        with tf.device(device):
            of_device = Rows(members.exchange.axis, counts[k * parts :][:parts])
            results += of_device.split(own)
    return results


# ---- with other processes ----------------------------------------------------


def _exchange_over_ranks(
    members: Sequence[Members],
    transport: Transport,
    gradients: GradientExchange | None,
    given: Sequence[Any],
) -> list[Any]:
    """Exchange this rank's tensors with those of other ranks.

    Tensors of the same dtype are sent as one message.

    Args:
        members: the members of N exchanges.
        transport: connects the processes.
        gradients: adds gradients up; None: as anything else is.
        given: what this process has of each.
    """
    for group, own in zip(members, given, strict=True):
        group.result = own
    known = {g: _RowsOfRanks.of(g, transport.size) for g in members}
    _scatter_over_ranks(known, transport)
    _gather_over_ranks(known, transport)
    summed: dict[Members, Any] = {}
    of_hooks: list[Members] = []
    for group in members:
        match group.exchange.kind:
            case "before":
                summed[group] = row_of_rank(group.result.pop(), transport)
            case "sum" if group.exchange.gradient and gradients:
                of_hooks.append(group)
            case "sum" | "scatter" if known[group] is None:
                summed[group] = group.result
    sums = sum_over_ranks(transport, list(summed.values())) if summed else []
    totals = dict(zip(summed, sums, strict=True))
    if of_hooks and gradients:
        gradients.over_ranks(of_hooks)
    for group in members:
        exchange = group.exchange
        match exchange.kind:
            case "sum" if group in totals:
                group.result = totals[group]
            case "scatter" if group in totals:
                group.result = _rows_of_takers(totals[group], group)
            case "before":
                earlier = tf.reduce_sum(totals[group][: transport.rank], 0)
                group.result = [before + earlier for before in group.result]
            case "gather" if known[group] is None:
                group.result = _gather_any_rows(
                    group.result, exchange.axis, transport
                )
            case "root":
                group.result = _from_root(exchange, group.result, transport)
    return [group.result for group in members]


def _rows_of_takers(whole: Any, members: Members) -> list[Any]:
    """Return the rows of a whole that each member gets, on its device."""
    axis, parts = members.exchange.axis, len(members.rows)
    parts //= len(members.devices)
    results = []
    for k, (first, count) in enumerate(members.rows):
        with tf.device(members.devices[k // parts]):
            results.append(_rows_of(whole, axis, first, count))
    return results


@dataclasses.dataclass(frozen=True)
class _RowsOfRanks:
    """The rows that each rank has of a tensor, along an axis.

    Attributes:
        dtype: the dtype of the tensor.
        shape: the shape that it has on all ranks together.
        axis: the axis.
        counts: for each rank the numbers of rows of its towers.
    """

    dtype: tf.DType
    shape: Sequence[int]
    axis: int
    counts: Sequence[Sequence[int]]

    @classmethod
    def of(cls, members: Members, ranks: int) -> _RowsOfRanks | None:
        """Return the rows of an exchange; None if not all ranks know them."""
        exchange, towers = members.exchange, len(members.devices)
        axis, units, own = exchange.axis, exchange.units, exchange.given.shape
        shape: list[Any] = list(exchange.sizes or ())
        if exchange.is_of_equal_parts and own.is_fully_defined():
            shape, parts = own.as_list(), len(members.values) // towers
            counts = [shape[axis] * parts] * (towers * ranks)
            shape[axis] = sum(counts)
        elif units is None or not all(isinstance(n, int) for n in shape):
            return None
        else:
            rows = shape[axis] // units
            counts = [rows * n for n in share_counts(units, towers * ranks)]
        of_ranks = [counts[k * towers :][:towers] for k in range(ranks)]
        return cls(exchange.given.dtype, shape, axis, of_ranks)

    @property
    def of_ranks(self) -> Rows:
        """The rows of all towers of each rank."""
        return Rows(self.axis, list(map(sum, self.counts)))


def _messages(
    kind: ExchangeKind, known: Mapping[Members, _RowsOfRanks | None]
) -> Iterator[dict[Members, _RowsOfRanks]]:
    """Yield the exchanges that share a message, with their rows."""
    pairs = [
        (group, rows)
        for group, rows in known.items()
        if rows is not None and group.exchange.kind == kind
    ]
    # Ranks group wholes: by their own rows, groups would differ.
    wholes = [tf.TensorSpec(rows.shape, rows.dtype) for _, rows in pairs]
    for indices in messages.group_by_bytes(wholes):
        yield dict(pairs[i] for i in indices)


def _scatter_over_ranks(
    known: Mapping[Members, _RowsOfRanks | None], transport: Transport
) -> None:
    """Replace sums over this rank's towers by this rank's rows of all sums."""
    for sent in _messages("scatter", known):
        message, sizes = messages.joined_rows(
            [tf.ensure_shape(g.result, r.shape) for g, r in sent.items()],
            [rows.of_ranks for rows in sent.values()],
        )
        own = transport.reduce_scatter(message, sizes, next_key("scatter"))
        shapes = [
            rows.of_ranks.shapes(rows.shape)[transport.rank]
            for rows in sent.values()
        ]
        parts = messages.divided(own, shapes)
        for (group, rows), part in zip(sent.items(), parts, strict=True):
            of_towers = Rows(rows.axis, rows.counts[transport.rank]).split(part)
            group.result = []
            for device, of_tower in zip(group.devices, of_towers, strict=True):
                with tf.device(device):
                    group.result.append(tf.identity(of_tower))


def _gather_over_ranks(
    known: Mapping[Members, _RowsOfRanks | None], transport: Transport
) -> None:
    """Replace the rows of this rank by those of all ranks."""
    for sent in _messages("gather", known):
        shapes = [rows.shape for rows in sent.values()]
        rows = [own.of_ranks for own in sent.values()]
        whole = transport.all_gather(
            messages.joined(group.result for group in sent),
            next_key("rows"),
            messages.elements_of_members(shapes, rows),
        )
        wholes = messages.wholes_of(whole, shapes, rows)
        for group, result in zip(sent, wholes, strict=True):
            group.result = result


def _gather_any_rows(tensor: Any, axis: int, transport: Transport) -> Any:
    """Join the tensors of all ranks along an axis."""
    if axis == 0:
        return transport.all_gather(tensor, next_key("rows"))
    order = list(range(tensor.shape.rank))
    order[0], order[axis] = order[axis], order[0]
    rows = transport.all_gather(tf.transpose(tensor, order), next_key("rows"))
    return tf.transpose(rows, order)


def _from_root(exchange: Exchange, value: Any, transport: Transport) -> Any:
    """Give all ranks the first rank's tensor."""
    shape, dtype = exchange.given.shape, exchange.given.dtype
    is_here = transport.rank == 0
    if shape.is_fully_defined() and dtype != tf.string:
        # A function of Python loses the shape that it was given.
        sent = (
            tf.ensure_shape(value, shape) if is_here else tf.zeros(shape, dtype)
        )
        (result,) = transport.broadcast([sent], next_key("root"))
        return result
    # Other ranks may not know the shape, and contribute no rows.
    flat = tf.reshape(value, [-1]) if is_here else tf.zeros([0], dtype)
    rows = transport.all_gather(flat, next_key("root"))
    sizes = tf.shape(value) if is_here else tf.zeros([0], tf.int32)
    sizes = transport.all_gather(sizes, next_key("root"))
    return tf.ensure_shape(tf.reshape(rows, sizes), shape)
