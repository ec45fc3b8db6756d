"""Exchanges by which a step becomes that of one device.

Where towers differ from one device, the analysis names an operation that does
not split: its inputs are a tower's examples, or sums over them. The step is
traced again with an exchange at these inputs, which makes them those of the
global batch, and again until the step is proven. Compilers that partition a
program place their communication likewise: GSPMD (arXiv 2105.04663).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.capture.pieces import placeholder
from keras_towers.fit.context import tower as tower_lib
from keras_towers.splitting import MEAN, SUM, Analysis
from keras_towers.splitting.values import Kind, Value

_WHAT = "exact=True"


@dataclasses.dataclass(frozen=True)
class Need:
    """A value of the global batch that replaces an input of an operation."""

    # The sum of the towers' sums, the mean of their means, or all towers' rows,
    # on an axis.
    what: Literal["sum", "mean", "rows"]
    axis: int = 0


Plan: TypeAlias = "Mapping[str, Mapping[int, Need]]"
"""What operations need, by their names and the indices of their inputs."""

LOSSES = ""
"""Stands for what takes the losses, by their numbers."""


def extended(
    plan: Plan, graph: Any, analysis: Analysis, losses: Sequence[tf.Tensor]
) -> Plan | None:
    """Return a plan with more exchanges, or None if none of them would help."""
    values = analysis.values
    causes = {
        difference.operation.name: found
        for difference in analysis.differences
        if (found := _needs(difference.operation, values))
    }
    for effect in analysis.effects:
        if effect.is_alike:
            continue
        given = {effect.at.name: _given_by_towers(effect.at, values)}
        for tensor in effect.at.inputs:
            reason = values[tensor.name].reason
            if reason is not None:
                given[reason.operation.name] = _needs(reason.operation, values)
        causes.update((name, needs) for name, needs in given.items() if needs)
    order = {op.name: at for at, op in enumerate(graph.get_operations())}
    known = sorted(causes.keys() & order.keys(), key=lambda name: order[name])
    last = max((order.get(loss.op.name, -1) for loss in losses), default=-1)
    # What the backward pass does may follow from what comes before it.
    more = {name: causes[name] for name in known if order[name] <= last}
    if not more:
        for number, loss in enumerate(losses):
            if _sum_of(values.get(loss.name)) != Need("sum"):
                continue
            if not _add_parts(loss, values, more):
                more.setdefault(LOSSES, {})[number] = Need("sum")
    if not more:
        more = {name: causes[name] for name in known[:1]}
    merged = {name: {**plan.get(name, {}), **more[name]} for name in more}
    new = any(merged[name] != plan.get(name) for name in merged)
    return {**plan, **merged} if new else None


def _needs(operation: Any, values: Mapping[str, Value]) -> dict[int, Need]:
    """Return the needs of an operation, if that operation does not split."""
    results = [values.get(tensor.name) for tensor in operation.outputs]
    reasons = [value.reason for value in results if value is not None]
    if not any(reason and reason.operation is operation for reason in reasons):
        return {}
    return _given_by_towers(operation, values)


def _given_by_towers(
    operation: Any, values: Mapping[str, Value]
) -> dict[int, Need]:
    """Return the needs for the inputs in which towers differ."""
    given = [values.get(tensor.name) for tensor in operation.inputs]
    sums = {i: need for i, v in enumerate(given) if (need := _sum_of(v))}
    return sums or {
        index: Need("rows", value.rows.axis)
        for index, value in enumerate(given)
        if value is not None
        and value.rows is not None
        and value.rows.axis >= 0
        and value.rows.draw is None
        and value.rows.unit is None
        and value.is_free
    }


def _sum_of(value: Value | None) -> Need | None:
    if value is None or value.is_same:
        return None
    if value.kind not in (Kind.SUM, Kind.SAME):
        return None
    if value.degree_as_sum == SUM:
        return Need("sum")
    return Need("mean") if value.degree_as_sum == MEAN else None


def _add_parts(
    tensor: tf.Tensor,
    values: Mapping[str, Value],
    found: dict[str, dict[int, Need]],
) -> bool:
    """Add needs for the first sums behind a tensor; return whether any are."""
    any_sums = False
    for index, given in enumerate(tensor.op.inputs):
        if _sum_of(values.get(given.name)) != Need("sum"):
            continue
        any_sums = True
        # Later sums follow from the first.
        if not _add_parts(given, values, found):
            found.setdefault(tensor.op.name, {})[index] = Need("sum")
    return any_sums


# Numbers of examples of a tower, and of all towers.
_OWN, _ALL = 3, 7


def fits(graph: Any, exchanges: Sequence[Any], analysis: Analysis) -> bool:
    """Whether no rows of one tower meet rows of all towers in a trace."""
    with compat.FuncGraph("sizes").as_default():
        # Nothing is known of the size of what is an operation for its own sake.
        hidden = [
            operation.outputs[0]
            for operation in graph.get_operations()
            if operation.type == "PlaceholderWithDefault"
        ]
        inputs = {
            tensor.name: placeholder(tensor, _sizes(tensor, analysis, _OWN))
            for tensor in (*graph.inputs, *hidden)
        }
        for exchange in exchanges:
            for result, given in zip(
                exchange.results, exchange.of, strict=True
            ):
                value = analysis.values[given.name]
                shape = _sizes(given, analysis, _ALL)
                inputs[result.name] = (
                    tf.constant(_ALL, result.dtype)
                    if value.kind is Kind.SAME
                    and value.degree == 1
                    and shape.rank == 0
                    else placeholder(result, shape)
                )
        # TensorFlow infers it from the numbers of rows.
        try:
            tf.graph_util.import_graph_def(
                _followed(graph.as_graph_def()), input_map=inputs, name=""
            )
        except ValueError:
            return False
    return True


def _followed(definition: Any) -> Any:
    """Drop operations through which TensorFlow infers no numbers."""
    same = {
        f"{node.name}:{index}" if index else node.name: given
        for node in definition.node
        if node.op == "IdentityN"
        for index, given in enumerate(node.input)
    }
    for node in definition.node:
        for index, given in enumerate(node.input):
            while given in same:
                given = same[given]
            node.input[index] = given
    return definition


def _sizes(
    tensor: tf.Tensor, analysis: Analysis, examples: int
) -> tf.TensorShape:
    """Return the shape of a tensor for a number of examples."""
    rows = analysis.values[tensor.name].rows
    if rows is None or rows.axis < 0 or rows.unit is not None:
        return tensor.shape
    sizes = list(tensor.shape)
    sizes[rows.axis] = examples * rows.count
    return tf.TensorShape(sizes)


class JoiningGraph(compat.FuncGraph):
    """The graph of a step whose operations get inputs of the global batch."""

    def __init__(self, name: str, plan: Plan):
        super().__init__(name)
        self._plan = plan

    def _create_op_internal(
        self,
        op_type: str,
        inputs: Sequence[tf.Tensor],
        dtypes: Any = None,
        input_types: Any = None,
        name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        needs = self._plan.get((name or "").rstrip("/"))
        if needs:
            with tf.device(None):
                inputs = [
                    joined(tensor, needs[index]) if index in needs else tensor
                    for index, tensor in enumerate(inputs)
                ]
        return super()._create_op_internal(
            op_type, inputs, dtypes, input_types, name, *args, **kwargs
        )


def joined(tensor: tf.Tensor, need: Need) -> tf.Tensor:
    """Replace a tensor by the value of the global batch that is needed."""
    from keras_towers.fit.step import gather as gather_lib

    context = gather_lib.replica_context(_WHAT)
    tower = tower_lib.with_a_share()
    if context is None or tower is None:
        return tensor
    if need.what == "rows":
        first = _with_axis_first(tensor, need.axis)
        whole = gather_lib.gather(context, first, _WHAT)
        return _with_axis_first(whole, need.axis, back=True)
    if need.what == "mean":
        tensor = tensor * tf.cast(tower.share, tensor.dtype)
    return gather_lib.all_reduce_sum(context, tensor)


def _with_axis_first(
    tensor: tf.Tensor, axis: int, back: bool = False
) -> tf.Tensor:
    if not axis:
        return tensor
    order = list(range(tensor.shape.rank))
    order.insert(0, order.pop(axis))
    if back:
        order = [order.index(place) for place in range(len(order))]
    return tf.transpose(tensor, order)
