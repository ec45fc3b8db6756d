"""Reduce first, then apply once, as on a single device.

``Optimizer.apply`` in a tower hands the tower's gradients to one place, where
they are summed over the towers; then Keras's own ``apply`` runs on the sums
exactly as it would on one device. Clipping, accumulation, loss scaling, weight
decay, moving averages and constraints so see the gradient of the global batch,
with no case of their own here. The new weights are then handed to the towers.

Where the towers do not share memory it can be cheaper that every tower applies
the same sums to its own copy; ``strategy.updates == "each"`` does that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import fused, gradients, shared
from keras_towers.fit import tower as tower_lib
from keras_towers.fit import variables as variables_lib


def scale_loss(original: Callable, optimizer: Any, loss: tf.Tensor):
    """``Optimizer.scale_loss`` that also weights the loss of this tower."""
    tower = tower_lib.current()
    context = tf.distribute.get_replica_context()
    strategy = context.strategy if context is not None else None
    if optimizer.built and getattr(strategy, "reduces_first", False):
        # A tower that is traced before the first apply() would go on reading
        # the copy of the scale that it had in the strategy's scope.
        with tf.init_scope():
            strategy.adoption.bind_optimizer(optimizer)
    if tower is None or tower.scales_loss:
        return original(optimizer, loss)
    # A subclass's scale_loss may call that of its base class.
    tower.scales_loss = True
    try:
        scaled = original(optimizer, loss)
    finally:
        tower.scales_loss = False
    tower.weighted_losses[id(optimizer)] += 1
    return scaled * tf.cast(tower.loss_weight, scaled.dtype)


def apply(
    original: Callable,
    optimizer: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """``Optimizer.apply`` that reduces over the towers first.

    Args:
        original: the class's own ``apply``.
        optimizer: the optimizer it was called on.
        grads: this tower's gradients, None where there is none.
        trainable_variables: the variables they belong to.
    """
    if shared.current() is not None:
        shared.apply(original, optimizer, grads, trainable_variables)
        return
    context = tf.distribute.get_replica_context()
    strategy = context.strategy if context is not None else None
    if not getattr(strategy, "reduces_first", False):
        original(optimizer, grads, trainable_variables)
        return
    if trainable_variables is None:
        trainable_variables = optimizer._trainable_variables
    trainable_variables = list(trainable_variables)
    share = gradients.Share(
        tuple(gradients.name_of(v) for v in trainable_variables),
        _weighted(optimizer, list(grads)),
    )

    def merge(strategy, shares):
        shares = strategy.experimental_local_results(shares)
        gradients.check_equal(shares)
        _make_ready(strategy, optimizer, trainable_variables)
        _reduce_and_apply(
            strategy, original, optimizer, shares, trainable_variables
        )

    context.merge_call(merge, args=(share,))


def _weighted(optimizer: Any, grads: list[Any]) -> list[Any]:
    """Weight the gradients, unless ``scale_loss`` weighted the loss."""
    tower = tower_lib.current()
    if tower is None:
        return grads
    if tower.weighted_losses[id(optimizer)]:
        tower.weighted_losses[id(optimizer)] -= 1
        return grads
    weight = tower.loss_weight
    if isinstance(weight, float) and weight == 1:
        return grads

    def weigh(grad):
        if grad is None:
            return None
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(
                weigh(grad.values), grad.indices, grad.dense_shape
            )
        return grad * tf.cast(weight, grad.dtype)

    return [weigh(grad) for grad in grads]


def _reduce_and_apply(
    strategy: Any,
    original: Callable,
    optimizer: Any,
    shares: Sequence[gradients.Share],
    trainable_variables: Sequence[Any],
) -> None:
    rows = [[g for g in share.grads if g is not None] for share in shares]
    variables = [
        variable
        for variable, grad in zip(
            trainable_variables, shares[0].grads, strict=True
        )
        if grad is not None
    ]
    reduced = strategy.lockstep.reduce(
        shares[0].described(),
        rows,
        lambda rows: strategy.sum_gradients(rows, variables),
    )
    each = strategy.updates == "each"
    for index in range(len(rows) if each else 1):
        sums = iter(reduced[index])
        grads = [None if g is None else next(sums) for g in shares[0].grads]
        with (
            as_one_device(strategy, optimizer, trainable_variables, index),
            fused.updates(),
        ):
            original(
                optimizer,
                grads,
                [_component(v, index) for v in trainable_variables],
            )
    if not each:
        variables_lib.hand_out(trainable_variables)


def _make_ready(
    strategy: Any, optimizer: Any, trainable_variables: Sequence[Any]
) -> None:
    """Build the optimizer if it is not, and put its state where it belongs.

    Outside of the function that is being traced, because its variables outlive
    that.
    """
    if not optimizer.built and not tf.executing_eagerly():
        # What was traced before took the optimizer for one without state (a
        # loss scale is then a constant): a tf.function that has made a
        # variable is traced once more.
        tf.Variable(0, trainable=False)
    with tf.init_scope():
        if not optimizer.built:
            with as_one_device(strategy, optimizer, trainable_variables):
                optimizer.build(list(trainable_variables))
        strategy.adoption.bind_optimizer(optimizer)


def _component(variable: Any, index: int) -> Any:
    if isinstance(variable, compat.DistributedVariable):
        return variable.values[index]
    return variable


def optimizer_chain(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizer and the optimizers inside it."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


class _Beside:
    """What an optimizer asks of a strategy, on one device or on several.

    TensorFlow's default strategy computes an update somewhere, and brings it to
    the variable; here it is computed where the variable is.
    """

    def __init__(self, default: tf.distribute.Strategy):
        self._default = default
        self.extended = self

    def colocate_vars_with(self, variable: Any) -> Any:
        return self._default.extended.colocate_vars_with(variable)

    def update(
        self,
        variable: Any,
        fn: Callable,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        with tf.device(variable.device):
            return fn(variable, *args, **(kwargs or {}))


@contextlib.contextmanager
def as_one_device(
    strategy: Any,
    optimizer: Any,
    trainable_variables: Sequence[Any],
    index: int = 0,
) -> Iterator[None]:
    """Let ``optimizer`` work on one tower as if there were no other.

    Inside, the Keras variables of the model and of the optimizer stand for
    the component of tower ``index``, and no strategy is in force. What is not
    an update of one variable runs beside the first of them.
    """
    chain = list(optimizer_chain(optimizer))
    strategies = [link._distribution_strategy for link in chain]
    home = strategy.extended.worker_devices[index]
    for variable in trainable_variables[:1]:
        value = getattr(variable, "_value", variable)
        home = _component(value, index).device
    with compat.single_device_mode():
        default = _Beside(tf.distribute.get_strategy())
        keras_variables = [
            variable
            for variables in (
                trainable_variables,
                *(link._trainable_variables for link in chain),
                optimizer.variables,
            )
            for variable in variables
            if isinstance(variable, keras.Variable)
        ]
        try:
            for link in chain:
                link._distribution_strategy = default
            with (
                variables_lib.viewed(
                    keras_variables, lambda v: v.values[index]
                ),
                tf.device(home),
            ):
                yield
        finally:
            for link, before in zip(chain, strategies, strict=True):
                link._distribution_strategy = before


def apply_gradients(
    original: Callable, optimizer: Any, grads_and_vars: Any
) -> Any:
    """``Optimizer.apply_gradients``, which a user may have overridden."""
    grads, variables = zip(*grads_and_vars, strict=True)
    context = tf.distribute.get_replica_context()
    strategy = context.strategy if context is not None else None
    if not getattr(strategy, "reduces_first", False):
        return original(optimizer, zip(grads, variables, strict=True))
    apply(
        lambda optimizer, grads, variables: original(
            optimizer, zip(grads, variables, strict=True)
        ),
        optimizer,
        grads,
        variables,
    )
    return optimizer._iterations


def sum_over_replicas(
    original: Callable, optimizer: Any, grads_and_vars: Any
) -> Any:
    """``Optimizer._all_reduce_sum_gradients``, left out on one device.

    TensorFlow's all-reduce over one replica is an identity with a gradient of
    its own, which TensorFlow never forgets, nor the graph that it is in: every
    trace of a step would stay in memory.
    """
    if tf.distribute.has_strategy():
        return original(optimizer, grads_and_vars)
    return list(grads_and_vars)


def on_one_device(original: Callable, callback: Any, optimizer: Any) -> None:
    """What a callback does with the variables of an optimizer, on tower 0."""
    strategy = tf.distribute.get_strategy()
    if not getattr(strategy, "reduces_first", False):
        original(callback, optimizer)
        return
    variables = list(optimizer._trainable_variables)
    with as_one_device(strategy, optimizer, variables):
        original(callback, optimizer)
    variables_lib.hand_out([*variables, *optimizer.variables])


def finalize_variable_values(
    original: Callable, optimizer: Any, var_list: Sequence[Any]
) -> None:
    """``Optimizer.finalize_variable_values`` for variables on towers."""
    strategy = tf.distribute.get_strategy()
    if not getattr(strategy, "reduces_first", False):
        original(optimizer, var_list)
        return
    with as_one_device(strategy, optimizer, var_list):
        original(optimizer, var_list)
    variables_lib.hand_out(var_list)
