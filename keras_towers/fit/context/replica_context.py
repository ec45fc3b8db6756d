"""TensorFlow's replica context of a tower, by which towers exchange values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit import told
from keras_towers.fit.context import tower as tower_lib


class TowerReplicaContext(compat.MirroredReplicaContext):
    """The replica context of a tower during a step."""

    # It reports the real number of towers, which layers that average by
    # ``all_reduce`` need: the strategy's ``num_replicas_in_sync`` is 1 during a
    # step, so that losses are not divided by it. Towers without examples
    # contribute zeros to an ``all_reduce``.

    def __init__(self, strategy: Strategy, index: int, total: int):
        super().__init__(strategy, index)
        self._total = total

    @property
    def num_replicas_in_sync(self) -> int:
        return self._total

    @property
    def replica_id_in_sync_group(self) -> Any:
        _ask_which()
        return super().replica_id_in_sync_group

    @property
    def devices(self) -> Any:
        _ask_which()
        return super().devices

    def merge_call(self, merge_fn, args=(), kwargs=None):
        """Exchange values with the other towers, which run their steps."""
        tower = tower_lib.current()
        if tower is not None:
            check_exchange(tower)
        if tower is None or tower.attributes is None:
            return super().merge_call(merge_fn, args, kwargs)
        mine = tower.attributes.take()
        result = super().merge_call(merge_fn, args, kwargs)
        tower.attributes.put(mine)
        return result

    def all_reduce(self, reduce_op, value, options=None):
        """Reduce over the towers that have examples."""
        tower = tower_lib.current()
        if tower is None:
            return super().all_reduce(reduce_op, value, options)
        value = tf.nest.map_structure(tower.count_only_if_live, value)
        values = tf.nest.flatten(tower.mixed(value))
        if any(isinstance(leaf, tf.IndexedSlices) for leaf in values):
            reduced = super().all_reduce(reduce_op, values, options)
        else:
            reduced = self._all_reduce(reduce_op, values, options)
        return tf.nest.pack_sequence_as(value, tower.weigh_gradient(reduced))

    def _all_reduce(
        self, reduce_op: Any, values: Sequence[Any], options: Any = None
    ) -> list[Any]:
        """Reduce N tensors as TensorFlow does, but trace it faster."""
        # TensorFlow searches all that the results depend on for variables: on
        # other towers that is their whole step, once for each all-reduce. Where
        # gradients are stopped it does not look further.
        told.warn_not_reduced(self.strategy)
        kind = getattr(reduce_op, "value", reduce_op).upper()
        reduce_op = tf.distribute.ReduceOp(kind)

        def merge(strategy, *values):
            pairs = [
                (value, value.device if tf.is_tensor(value) else value)
                for value in values
            ]
            return strategy.extended.batch_reduce_to(reduce_op, pairs, options)

        def run(values: list[tf.Tensor]) -> list[Any]:
            context: Any = tf.distribute.get_replica_context()
            return list(context.merge_call(merge, args=tuple(values)))

        @tf.custom_gradient
        def reduce(*values):
            results = [
                tower_lib.Exchanged(kind.lower(), value, value.shape)
                for value in values
            ]
            reduced = tower_lib.exchanged(results, list(values), run)
            return (
                [tf.stop_gradient(result) for result in reduced],
                lambda *grads: self.all_reduce(reduce_op, grads, options),
            )

        return list(reduce(*values))

    def sum_counts(self, count: tf.Tensor) -> tf.Tensor:
        """Sum a value that no gradient flows through."""
        tower = tower_lib.current()
        if tower is not None:
            count = tower.count_only_if_live(count)
        return self._all_reduce(tf.distribute.ReduceOp.SUM, [count])[0]


def _ask_which() -> None:
    tower = tower_lib.current()
    if tower is not None:
        tower.differs("asks which tower it runs on")


def check_exchange(tower: tower_lib.Tower) -> None:
    """Check that a tower's step may exchange values here."""
    if tower.exchange is None:
        tower.is_whole("exchanges values with other towers")
    if tower.attributes is None or tf.executing_eagerly():
        return
    if compat.get_default_graph() is tower.graph:
        return
    raise TowerError(
        "towers cannot exchange anything inside tf.cond, tf.while_loop or a "
        "tf.function of the step, but optimizer.apply, a synchronized layer or "
        "a function such as kt.gather was called there. Compute gradients "
        "inside and call optimizer.apply outside, at the top level of "
        "train_step; to skip an update on a condition, multiply the gradients "
        "by 0 there."
    )


def graphs_inside(step: tf.Graph) -> list[tf.Graph] | None:
    """The loops and conditionals around the current code, inside of a step."""
    # None inside a function that may be called again by another step.
    graph, found = compat.get_default_graph(), []
    while graph is not step:
        if not isinstance(graph, compat.ControlFlowFuncGraph):
            return None
        found.append(graph)
        graph = graph.outer_graph
    return found


@contextlib.contextmanager
def activate(tower: tower_lib.Tower) -> Iterator[tower_lib.Tower]:
    """Make ``tower`` the current one of this thread inside a block."""
    outer = tf.distribute.get_replica_context()
    inner: Any = contextlib.nullcontext()
    if isinstance(outer, compat.MirroredReplicaContext):
        inner = TowerReplicaContext(
            outer.strategy, compat.current_replica_id(), tower.total
        )
    if not tf.executing_eagerly():
        tower.graph = compat.get_default_graph()
    with inner, tower_lib.made_current(tower):
        yield tower
