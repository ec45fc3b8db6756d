"""Optimizers on towers.

While a strategy is active, the methods of every optimizer are looked up here:
``apply`` passes gradients to the update of the strategy. The optimizer keeps
its class. The update itself runs on a single tower, as on one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit import contract
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.contract import UpdateCall, name_of
from keras_towers.fit.update import update_rules
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.fit.weights.model_state import optimizers_in, trained_by
from keras_towers.fit.weights.tower_variables import copy_on_tower

if TYPE_CHECKING:
    from keras_towers.fit.update.sharded import UpdateShares

_updating: ThreadLocal[bool] = ThreadLocal()


def apply(
    optimizer: Any,
    original: Callable[..., None],
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """Replace ``apply``: gradients of towers are reduced first."""
    handle = _current_update_handler()
    if handle is None:
        original(grads, trainable_variables)
        return

    given = trainable_variables
    variables = list(optimizer._trainable_variables if given is None else given)
    names = tuple(map(name_of, variables))
    call = UpdateCall(names, list(grads), optimizer, original, variables)
    if thread_state.current_step() and all(grad is None for grad in call.grads):
        # Keras raises its own error.
        original(grads, trainable_variables)
    else:
        handle(call)


def _current_update_handler() -> Callable[[UpdateCall], None] | None:
    """Return the handler of optimizer calls here; None: Keras handles them."""
    step, strategy = thread_state.current_step(), contract.active_strategy()
    if step is not None:
        return step.apply if step.takes_updates else None
    if strategy is None:
        return None
    update = strategy._update
    # Replicas' gradients are summed; outside of them there is nothing to sum.
    across = tf.distribute.in_cross_replica_context()
    return update.apply_outside if across else update.apply_in_replica


def _build(
    optimizer: Any, original: Callable[..., None], variables: Sequence[Any]
) -> None:
    strategy = contract.active_strategy()
    across = tf.distribute.in_cross_replica_context()
    if strategy is None or not across or optimizer.built:
        original(variables)
        return
    strategy._update.make_ready(optimizer, list(variables))


def _finalize_variable_values(
    optimizer: Any, original: Callable[..., None], variables: Sequence[Any]
) -> None:
    if contract.active_strategy() is None:
        original(variables)
        return
    with as_one_device(optimizer, variables):
        original(variables)
    variables_lib.copy_to_towers(variables)


_METHODS: patches.Shadows = {
    "apply": apply,
    "build": _build,
    "finalize_variable_values": _finalize_variable_values,
}


def attribute_of_optimizer(
    original: Callable[[Any, str], Any], optimizer: Any, name: str
) -> Any:
    """Replace the attribute look-up of optimizers.

    It also finds optimizers that are not attributes of the model, which
    adoption does not see. During an update, an optimizer may call the original
    methods of an optimizer that it wraps.
    """
    value = original(optimizer, name)
    if name not in _METHODS or _updating.get():
        return value
    if name != "apply" and isinstance(value, functools.partial):
        return value  # The instance shadows the method.
    return functools.partial(_METHODS[name], optimizer, value)


class _InPlaceStrategy:
    """The strategy interface that optimizers use; updates run in place.

    TensorFlow's default strategy does not choose the device of an update; here
    the update runs on the device of the variable.
    """

    def __init__(self, default: Strategy, only: UpdateShares | None):
        self._default = default
        self._only = only
        self.extended = self

    def colocate_vars_with(self, variable: Any) -> Any:
        if self._only is not None:
            return tf.device(self._only.slot_device(variable))
        return self._default.extended.colocate_vars_with(variable)

    def update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        with tf.device(variable.device):
            return fn(variable, *args, **(kwargs or {}))


@contextlib.contextmanager
def as_one_device(
    optimizer: Any,
    trainable_variables: Sequence[Any],
    tower: int | None = None,
    only: UpdateShares | None = None,
) -> Iterator[None]:
    """Run an optimizer as if its variables existed only once.

    Inside, the Keras variables of the model and of the optimizer resolve to
    their copies on one tower, and no strategy is active. Operations that do not
    update a variable run on the device of the first weight. The optimizer, and
    any optimizer that it wraps, use fewer operations than in Keras.

    Args:
        optimizer: the optimizer.
        trainable_variables: the weights that it updates.
        tower: the tower; None: for each weight the tower that updates it.
        only: the weights that this rank updates; None: all.
    """
    weights = [*trainable_variables, *trained_by(optimizer)]
    variables = [
        variable
        for variable in (*weights, *optimizer.variables)
        if isinstance(variable, keras.Variable)
    ]
    device = None
    if trainable_variables:
        first = trainable_variables[0]
        device = copy_on_tower(
            getattr(first, "_value", first), tower or 0
        ).device
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.single_device_mode())
        stack.enter_context(_updating.holding(True))
        default = _InPlaceStrategy(tf.distribute.get_strategy(), only)
        for part in optimizers_in(optimizer):
            replaced = patches.bind_to(part, update_rules.shadows(part))
            replaced["_distribution_strategy"] = default
            stack.enter_context(patches.shadowed(part, replaced))
            if only is not None:
                # They call those above.
                replaced = patches.bind_to(part, only.shadows())
                stack.enter_context(patches.shadowed(part, replaced))
        values = ((v, copy_on_tower(v._value, tower)) for v in variables)
        stack.enter_context(variables_lib.with_values(values))
        stack.enter_context(tf.device(device))
        yield
