"""Optimizers on towers.

In a step that is traced for towers, and in a replica, the ``apply`` of an
optimizer passes gradients to the update of the strategy. The optimizer keeps
its class: its methods are looked up here while a strategy is in force. The
update itself runs on a single tower, as on one device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit import contract
from keras_towers.fit.context import patches, traced
from keras_towers.fit.context.blocks import Slot
from keras_towers.fit.contract import TakesGradients, UpdateCall, name_of
from keras_towers.fit.update import update_rules
from keras_towers.fit.weights import tower_variables as variables_lib
from keras_towers.fit.weights.model_state import optimizers_in
from keras_towers.fit.weights.tower_variables import TowerOf, component

if TYPE_CHECKING:
    from keras_towers.fit.update.sharded import Shares

_updating: Slot[bool] = Slot()
_interceptors: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def intercept(optimizer: Any, interceptor: str) -> None:
    """Make an optimizer reduce over the towers of the named strategy."""
    for part in optimizers_in(optimizer):
        _interceptors[part] = interceptor


def use_default_strategy(optimizer: Any) -> None:
    """Set an optimizer's strategy to TensorFlow's default one."""
    with compat.single_device_mode():
        default = tf.distribute.get_strategy()
    for part in optimizers_in(optimizer):
        part._distribution_strategy = default


def stop_intercepting(optimizer: Any) -> None:
    """Undo ``intercept``."""
    for part in optimizers_in(optimizer):
        _interceptors.pop(part, None)
    use_default_strategy(optimizer)


def interceptor_of(optimizer: Any) -> str | None:
    """Return the name of the strategy that took an optimizer, or None."""
    return _interceptors.get(optimizer)


def update_in_force() -> TakesGradients | None:
    """Return the update of gradients computed here; None: it is Keras's."""
    # Also None during an update, where an optimizer calls the one it wraps.
    if _updating.get():
        return None
    step = traced.current()
    if step is not None:
        return step.update if step.takes_updates else None
    if tf.distribute.get_replica_context() is None:
        return None
    strategy = contract.in_force()
    return None if strategy is None else strategy._components.update


def apply(
    optimizer: Any,
    original: Callable[..., None],
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """Replace ``apply``: the towers' gradients are reduced first."""
    update = update_in_force()
    if update is None:
        original(grads, trainable_variables)
        return

    def own(grads: Sequence[Any], variables: Sequence[Any]) -> None:
        with _updating.filled(True):
            original(grads, variables)

    given = trainable_variables
    variables = list(optimizer._trainable_variables if given is None else given)
    names = tuple(map(name_of, variables))
    call = UpdateCall(names, list(grads), optimizer, own, variables)
    step = traced.current()
    if step is None:
        update.apply(call)
    elif any(gradient is not None for gradient in call.grads):
        step.apply(call)
    else:
        # It has its own words for that.
        original(grads, trainable_variables)


def _apply_gradients(
    optimizer: Any, original: Callable[..., Any], grads_and_vars: Any
) -> Any:
    """Replace ``apply_gradients``, which a subclass may override."""
    pairs = list(grads_and_vars)
    if update_in_force() is None or not pairs:
        return original(pairs)
    grads, variables = zip(*pairs, strict=True)
    apply(
        optimizer,
        lambda grads, variables: original(zip(grads, variables, strict=True)),
        grads,
        variables,
    )
    return optimizer._iterations


def _scale_loss(
    optimizer: Any, original: Callable[..., Any], loss: tf.Tensor
) -> tf.Tensor:
    update = update_in_force()
    if optimizer.built and update is not None and traced.current() is None:
        # A trace made before the first apply() would keep reading the copy of
        # the scale that was created in the strategy's scope.
        with tf.init_scope():
            update.place_optimizer(optimizer)
    return original(loss)


def _build(
    optimizer: Any, original: Callable[..., None], variables: Sequence[Any]
) -> None:
    strategy = contract.in_force()
    across = tf.distribute.in_cross_replica_context()
    if strategy is None or not across or optimizer.built:
        original(variables)
        return
    strategy._components.update.make_ready(optimizer, list(variables))


def _finalize_variable_values(
    optimizer: Any, original: Callable[..., None], var_list: Sequence[Any]
) -> None:
    if contract.in_force() is None:
        original(var_list)
        return
    with as_one_device(optimizer, var_list):
        original(var_list)
    variables_lib.copy_to_towers(var_list)


def _outside(
    optimizer: Any,
    original: Callable[..., Any],
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """Apply gradients outside of any step, as one device does."""
    given = trainable_variables
    variables = list(optimizer._trainable_variables if given is None else given)
    strategy = contract.in_force()
    assert strategy is not None
    index = strategy._components.update.updater
    with _updating.filled(True), as_one_device(optimizer, variables, index):
        original(grads, [component(v, index) for v in variables])
    variables_lib.copy_to_towers(_known_to(optimizer, variables), index)


def _outside_by_pairs(
    optimizer: Any, original: Callable[..., Any], grads_and_vars: Any
) -> Any:
    """Apply pairs of gradients and variables outside of any step."""
    pairs = list(grads_and_vars)
    _outside(
        optimizer,
        lambda grads, variables: original(zip(grads, variables, strict=True)),
        [gradient for gradient, _ in pairs],
        [variable for _, variable in pairs],
    )
    return optimizer._iterations


_APPLY: patches.Shadows = {"apply": apply, "apply_gradients": _apply_gradients}
_OUTSIDE: patches.Shadows = {
    "apply": _outside,
    "apply_gradients": _outside_by_pairs,
}
_OTHERS: patches.Shadows = {
    "build": _build,
    "scale_loss": _scale_loss,
    "finalize_variable_values": _finalize_variable_values,
}


def attribute_of_optimizer(
    original: Callable[[Any, str], Any], optimizer: Any, name: str
) -> Any:
    """Replace the look-up of the methods above.

    A step may use an optimizer that nobody has taken, since it is not an
    attribute of the model.
    """
    value = original(optimizer, name)
    if name in _OTHERS and not isinstance(value, patches.Bound):
        return functools.partial(_OTHERS[name], optimizer, value)
    if name not in _APPLY:
        return value
    if update_in_force() is None:
        alone = traced.current() is None and not _updating.get()
        across = tf.distribute.in_cross_replica_context()
        if alone and across and contract.in_force() is not None:
            return functools.partial(_OUTSIDE[name], optimizer, value)
        return value
    return functools.partial(_APPLY[name], optimizer, value)


class _AtTheVariable:
    """The strategy interface that optimizers use; updates run in place.

    TensorFlow's default strategy leaves the device of an update open; here it
    runs on the device of the variable.
    """

    def __init__(self, default: Strategy, only: Shares | None):
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


def home(variables: Sequence[Any], index: int = 0) -> str | None:
    """Return the device of the first variable; None without variables."""
    for variable in variables:
        return component(getattr(variable, "_value", variable), index).device
    return None


@contextlib.contextmanager
def updating(
    optimizer: Any,
    only: Shares | None = None,
) -> Iterator[None]:
    """Make an optimizer, and those it wraps, use fewer operations."""
    # ``only`` has the weights that this rank updates; None: all.
    default = _AtTheVariable(tf.distribute.get_strategy(), only)
    with contextlib.ExitStack() as stack:
        for each in optimizers_in(optimizer):
            methods = {
                **update_rules.shadows(each),
                **(only.shadows() if only is not None else {}),
            }
            mine = patches.bound(each, methods)
            mine["_distribution_strategy"] = default
            stack.enter_context(patches.shadowed(each, mine))
        yield


def _known_to(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return variables, the optimizer's own, and those that it trains."""
    known = [*variables, *optimizer.variables]
    for each in optimizers_in(optimizer):
        known.extend(each._trainable_variables)
    return known


@contextlib.contextmanager
def as_one_device(
    optimizer: Any,
    trainable_variables: Sequence[Any],
    index: TowerOf = 0,
    only: Shares | None = None,
) -> Iterator[None]:
    """Run an optimizer as if its variables existed once.

    Inside, the Keras variables of the model and of the optimizer resolve to
    their components on one tower, or that of each variable, and no strategy is
    active. Operations that do not update a variable run on the device of the
    first one.
    """
    known = _known_to(optimizer, trainable_variables)
    device = home(trainable_variables, 0 if callable(index) else index)
    with (
        compat.single_device_mode(),
        updating(optimizer, only),
        variables_lib.viewed(
            [v for v in known if isinstance(v, keras.Variable)],
            lambda v: component(v, index),
        ),
        tf.device(device),
    ):
        yield
