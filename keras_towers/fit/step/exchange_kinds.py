"""Exchanges among the towers of a process, and then among processes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from keras_towers.fit import step_clock
from keras_towers.fit.contract import ApplyCall
from keras_towers.fit.step_order import row_of_rank
from keras_towers.fit.weights.shards import share_counts
from keras_towers.partition.program import Exchange, ExchangeKind
from keras_towers.reduction import Gradients, sum_over_ranks
from keras_towers.transport import Transport, messages, next_key


class GradientSums(Protocol):
    """What adds up gradients of weights."""

    def sum_over_towers(
        self, tower_grads: Gradients, weights: Sequence[Any]
    ) -> list[list[Any]]:
        """Return K lists of N sums, given K lists of N gradients."""
        ...

    def sum_over_ranks(
        self, optimizer: Any, weights: Sequence[Any], grads: Sequence[Any]
    ) -> list[Any]:
        """Return N sums, given this rank's N gradients for an optimizer."""
        ...


class GradientExchange:
    """Adds gradients up in a step, as a strategy does.

    Args:
        sums: adds them up.
        gradients: by the names of their tensors in the trace: the call of the
            optimizer, and the weight.
    """

    def __init__(
        self,
        sums: GradientSums,
        gradients: Mapping[str, tuple[ApplyCall, Any]],
    ):
        self._sums, self._gradients = sums, gradients

    def over_towers(self, members: Sequence[Members]) -> list[list[Any]]:
        """Return K sums for each of N exchanges among the towers."""
        weights = [self._gradients[m.exchange.gradient][1] for m in members]
        tower_grads = zip(*(m.values for m in members), strict=True)
        rows = self._sums.sum_over_towers(list(map(list, tower_grads)), weights)
        return list(map(list, zip(*rows, strict=True)))

    def over_ranks(
        self, members: Sequence[Members], tensors: Sequence[Any]
    ) -> list[Any]:
        """Return sums of what this rank has of gradients, or of their rows."""
        sums: dict[int, Any] = {}
        of = [self._gradients[m.exchange.gradient] for m in members]
        calls = {id(call.optimizer): call for call, _ in of}
        for call in calls.values():
            own = [
                k
                for k, (other, _) in enumerate(of)
                if other.optimizer is call.optimizer
            ]
            totals = self._sums.sum_over_ranks(
                call.optimizer,
                [of[k][1] for k in own],
                [tensors[k] for k in own],
            )
            sums.update(zip(own, totals, strict=True))
        return [sums[k] for k, _ in enumerate(tensors)]


@dataclasses.dataclass(frozen=True, eq=False)
class Members:
    """Those of this process that exchange a tensor: towers, or columns.

    Attributes:
        exchange: the exchange.
        devices: the devices of K members.
        values: their tensors; empty if only the first process has one.
        rows: for each member that gets rows of the result, the first of them
            and their number.
        takers: who gets the result of each member, or that of all.
    """

    exchange: Exchange
    devices: Sequence[str]
    values: Sequence[Any]
    rows: Sequence[Sequence[Any]] = ()
    takers: Sequence[Any] = ()


def exchange_tensors(
    members: Sequence[Members],
    transport: Transport,
    in_order: Callable[[Sequence[Any], Callable[..., list[Any]]], list[Any]],
    gradients: GradientExchange | None = None,
) -> list[Any]:
    """Exchange tensors among towers and columns, and then among processes.

    Args:
        members: those of this process in each of N exchanges.
        transport: connects the processes.
        in_order: as ``StepOrder.exchange``.
        gradients: adds gradients up; None: as anything else is.

    Returns:
        The result of each exchange; a list of results if each member has its
        own.
    """
    over_ranks = {
        k: group
        for k, group in enumerate(members)
        if transport.size > 1 and "ranks" in group.exchange.over
    }
    sums = _sum_gradients(members, gradients)
    results: list[Any] = []
    for k, group in enumerate(members):
        with tf.device(group.devices[0]):
            goes_on = k in over_ranks
            result = sums[k] if k in sums else _exchange_here(group, goes_on)
            if k in sums and (goes_on or not group.exchange.is_own):
                result, *_ = result
            results.append(result)
    if over_ranks:
        exchange = functools.partial(
            _exchange_over_ranks,
            [*over_ranks.values()],
            transport,
            gradients,
        )
        with tf.device(members[0].devices[0]):
            exchanged = in_order([results[k] for k in over_ranks], exchange)
        for k, result in zip(over_ranks, exchanged, strict=True):
            results[k] = result
    _mark_gradients(members, results)
    return results


def _mark_gradients(members: Sequence[Members], results: Sequence[Any]) -> None:
    """Mark when towers have their gradients, and when these are added up."""
    exchanged = [
        (group, result)
        for group, result in zip(members, results, strict=True)
        if group.exchange.gradient and "towers" in group.exchange.over
    ]
    for tower in range(len(exchanged[0][0].devices) if exchanged else 0):
        computed = [group.values[tower] for group, _ in exchanged]
        step_clock.reached(tower, "computed", computed)
        reduced = [
            result[tower] if group.exchange.is_own else result
            for group, result in exchanged
            if group.exchange.is_own or tower == 0
        ]
        if reduced:
            step_clock.reached(tower, "reduced", reduced)


def _sum_gradients(
    members: Sequence[Members], gradients: GradientExchange | None
) -> dict[int, list[Any]]:
    """Return sums of gradients over towers, by the index of the exchange."""
    own = {
        k: group
        for k, group in enumerate(members)
        if group.exchange.kind == "sum"
        and group.exchange.gradient
        and "towers" in group.exchange.over
        and not group.exchange.given.on_columns
        and len(group.values) > 1
    }
    if not own or gradients is None:
        return {}
    return dict(zip(own, gradients.over_towers([*own.values()]), strict=True))


def _exchange_here(members: Members, goes_on: bool) -> Any:
    """Exchange the tensor of the members of this process.

    Args:
        members: the members.
        goes_on: whether the result is that of one of several ranks, which go
            on to exchange it: a sum, rows or a value.

    Returns:
        The result; a list of results if each member has its own.
    """
    exchange, devices = members.exchange, members.devices
    values, axis = list(members.values), members.exchange.axis
    if not values:
        return None
    match exchange.kind:
        case "sum" if exchange.is_own and not goes_on:
            total = tf.add_n(values)
            return [total for _ in devices]
        case "sum":
            return tf.add_n(values)
        case "scatter" if goes_on:
            return tf.add_n(values)
        case "gather" if exchange.is_own and not goes_on:
            return _gather_on_members(values, axis, devices)
        case "gather":
            return tf.concat(values, axis)
        case "scatter":
            return _scatter(values, axis, members.rows, devices)
        case "before":
            nothing = tf.zeros_like(values[0])
            before = itertools.accumulate(values, initial=nothing)
            return [*before] if goes_on else [*before][:-1]
        case _:
            return values[0]


def _exchange_over_ranks(
    members: Sequence[Members],
    transport: Transport,
    gradients: GradientExchange | None,
    results: Sequence[Any],
) -> list[Any]:
    """Exchange with other ranks what the members of this one have together.

    Tensors of the same dtype are sent as one message.

    Args:
        members: the members of N exchanges.
        transport: connects the processes.
        gradients: adds gradients up; None: as anything else is.
        results: the results of ``_exchange_here``.
    """
    results = [*results]
    rows_of_ranks = [
        _RowsOfRanks.of(group, transport.size) for group in members
    ]
    _scatter_over_ranks(members, rows_of_ranks, results, transport)
    _gather_over_ranks(members, rows_of_ranks, results, transport)
    summed: dict[int, Any] = {}
    of_hooks: dict[int, Any] = {}
    for k, group in enumerate(members):
        match group.exchange.kind:
            case "before":
                summed[k] = row_of_rank(results[k].pop(), transport)
            case "sum" if group.exchange.gradient and gradients:
                of_hooks[k] = results[k]
            case "sum" | "scatter" if rows_of_ranks[k] is None:
                summed[k] = results[k]
    sums = sum_over_ranks(transport, list(summed.values())) if summed else []
    totals = dict(zip(summed, sums, strict=True))
    if of_hooks and gradients:
        groups = [members[k] for k in of_hooks]
        sums = gradients.over_ranks(groups, list(of_hooks.values()))
        totals.update(zip(of_hooks, sums, strict=True))
    for k, group in enumerate(members):
        exchange, devices = group.exchange, group.devices
        match exchange.kind:
            case "sum":
                results[k] = totals[k]
                if exchange.is_own:
                    results[k] = [totals[k]] * len(devices)
            case "scatter" if k in totals:
                rows, axis = group.rows, exchange.axis
                results[k] = _scatter([totals[k]], axis, rows, devices)
            case "before":
                earlier = tf.reduce_sum(totals[k][: transport.rank], 0)
                results[k] = [before + earlier for before in results[k]]
            case "gather":
                if rows_of_ranks[k] is None:
                    results[k] = _gather_any_rows(
                        results[k], exchange.axis, transport
                    )
                if exchange.is_own:
                    results[k] = [results[k]] * len(devices)
            case "root":
                results[k] = _from_root(exchange, results[k], transport)
    return results


def _gather_on_members(
    values: Sequence[Any], axis: int, devices: Sequence[str]
) -> list[Any]:
    """Join the tensors of members on each of their devices."""
    wholes: dict[str, Any] = {}
    for device in devices:
        if device not in wholes:
            with tf.device(device):
                wholes[device] = tf.concat(list(values), axis)
    return [wholes[device] for device in devices]


def _scatter(
    values: Sequence[Any],
    axis: int,
    rows: Sequence[Any],
    devices: Sequence[str],
) -> list[Any]:
    """Add up the tensors of members; return the rows of each taker.

    Args:
        values: the tensors of K members, or one that is summed already.
        axis: the axis of the rows.
        rows: for each member, or each micro-batch of each tower, the first of
            its rows and their number.
        devices: the K members' devices.
    """
    parts = len(rows) // len(devices)
    results: list[Any] = []
    for k, (first, count) in enumerate(rows):
        terms: list[Any] = []
        for value, device in zip(values, devices, strict=False):
            begin: list[Any] = [0] * value.shape.rank
            size: list[Any] = [-1] * value.shape.rank
            begin[axis], size[axis] = first, count
            with tf.device(device):
                terms.append(tf.slice(value, begin, size))
        with tf.device(devices[k // parts]):
            results.append(tf.add_n(terms))
    return results


@dataclasses.dataclass(frozen=True)
class _RowsOfRanks:
    """The rows of an axis that each rank has of a tensor.

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
        """Return the rows of an exchange; None: not all ranks know them."""
        exchange, towers = members.exchange, len(members.devices)
        axis, units, sizes = exchange.axis, exchange.units, exchange.sizes or ()
        shape = [size for size in sizes if isinstance(size, int)]
        if units is None or not shape or len(shape) < len(sizes):
            return None
        rows = shape[axis] // units
        counts = [rows * n for n in share_counts(units, towers * ranks)]
        of_ranks = [counts[k * towers :][:towers] for k in range(ranks)]
        return cls(exchange.given.dtype, shape, axis, of_ranks)

    def shape_of(self, rank: int) -> list[int]:
        """Return the shape of a rank's rows."""
        shape = list(self.shape)
        shape[self.axis] = sum(self.counts[rank])
        return shape


def _messages(
    kind: ExchangeKind,
    members: Sequence[Members],
    rows_of_ranks: Sequence[_RowsOfRanks | None],
) -> Iterator[dict[int, _RowsOfRanks]]:
    """Yield the exchanges of a kind that share a message, by their index."""
    known = [
        (k, rows)
        for k, rows in enumerate(rows_of_ranks)
        if rows is not None and members[k].exchange.kind == kind
    ]
    # Of their own rows, ranks would have groups of other sizes.
    wholes = [tf.TensorSpec(rows.shape, rows.dtype) for _, rows in known]
    for group in messages.buckets(wholes):
        yield dict(known[i] for i in group)


def _sizes_of_ranks(group: Mapping[int, _RowsOfRanks]) -> list[int]:
    """Return how many entries of a message are of each rank's rows."""
    ranks = range(len(next(iter(group.values())).counts))
    return [
        sum(math.prod(rows.shape_of(rank)) for rows in group.values())
        for rank in ranks
    ]


def _is_in_order(group: Mapping[int, _RowsOfRanks]) -> bool:
    """Whether the rows of one rank follow those of another in memory.

    A message is then the tensor itself, which takes no copy.
    """
    first, *others = group.values()
    return not others and math.prod(first.shape[: first.axis]) == 1


def _scatter_over_ranks(
    members: Sequence[Members],
    rows_of_ranks: Sequence[_RowsOfRanks | None],
    results: list[Any],
    transport: Transport,
) -> None:
    """Replace the sums of this rank's towers by the rows that each takes."""
    for group in _messages("scatter", members, rows_of_ranks):
        key = next_key("scatter")
        sizes = _sizes_of_ranks(group)
        if _is_in_order(group):
            (only,) = group
            message = tf.reshape(results[only], [-1])
        else:
            parts = [
                tf.split(results[k], list(map(sum, rows.counts)), rows.axis)
                for k, rows in group.items()
            ]
            vectors = map(messages.joined, zip(*parts, strict=True))
            message = tf.concat(list(vectors), 0)
        own = transport.reduce_scatter(message, sizes, key)
        shapes = [rows.shape_of(transport.rank) for rows in group.values()]
        for (k, rows), part in zip(
            group.items(), messages.divided(own, shapes), strict=True
        ):
            counts = rows.counts[transport.rank]
            results[k] = []
            for device, of_tower in zip(
                members[k].devices,
                tf.split(part, counts, rows.axis),
                strict=True,
            ):
                with tf.device(device):
                    results[k].append(tf.identity(of_tower))


def _gather_over_ranks(
    members: Sequence[Members],
    rows_of_ranks: Sequence[_RowsOfRanks | None],
    results: list[Any],
    transport: Transport,
) -> None:
    """Replace the rows of this rank by those of all ranks."""
    for group in _messages("gather", members, rows_of_ranks):
        sizes = _sizes_of_ranks(group)
        whole = transport.all_gather(
            messages.joined(results[k] for k in group), next_key("rows"), sizes
        )
        if _is_in_order(group):
            ((only, rows),) = group.items()
            results[only] = tf.reshape(whole, rows.shape)
            continue
        shapes = [
            [rows.shape_of(rank) for rows in group.values()]
            for rank in range(transport.size)
        ]
        parts = map(messages.divided, tf.split(whole, sizes), shapes)
        for (k, rows), of_ranks in zip(
            group.items(), zip(*parts, strict=True), strict=True
        ):
            results[k] = tf.concat(of_ranks, rows.axis)


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
        sent = value if is_here else tf.zeros(shape, dtype)
        (result,) = transport.broadcast([sent], next_key("root"))
        return result
    # Other ranks may not know the shape, and contribute no rows.
    flat = tf.reshape(value, [-1]) if is_here else tf.zeros([0], dtype)
    rows = transport.all_gather(flat, next_key("root"))
    sizes = tf.shape(value) if is_here else tf.zeros([0], tf.int32)
    sizes = transport.all_gather(sizes, next_key("root"))
    return tf.ensure_shape(tf.reshape(rows, sizes), shape)
