"""Running an optimizer on a single tower, as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit.context import patches
from keras_towers.fit.update import rules
from keras_towers.fit.weights import variables as variables_lib
from keras_towers.fit.weights.state import optimizers_in
from keras_towers.fit.weights.variables import TowerOf, component

if TYPE_CHECKING:
    from keras_towers.fit.update.shares import Shares


class _AtTheVariable:
    """The strategy interface that optimizers use; updates run in place."""

    # TensorFlow's default strategy leaves the device of an update open; here it
    # runs on the device of the variable.

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
    shared: Collection[int] = (),
    only: Shares | None = None,
) -> Iterator[None]:
    """Make an optimizer, and those it wraps, use fewer operations."""
    # ``shared`` has the ids of ``tf.Variable``s whose buffers towers share, and
    # ``only`` the weights that this rank updates; None: all.
    default = _AtTheVariable(tf.distribute.get_strategy(), only)
    with contextlib.ExitStack() as stack:
        for each in optimizers_in(optimizer):
            methods = {
                **rules.shadows(each, shared),
                **(only.shadows() if only is not None else {}),
            }
            mine = patches.bound(each, methods)
            mine["_distribution_strategy"] = default
            stack.enter_context(patches.shadowed(each, mine))
        yield


@contextlib.contextmanager
def as_one_device(
    optimizer: Any,
    trainable_variables: Sequence[Any],
    index: TowerOf = 0,
    shared: Collection[int] = (),
    only: Shares | None = None,
) -> Iterator[None]:
    """Run an optimizer as if its variables existed once."""
    # Inside, the Keras variables of the model and of the optimizer resolve to
    # their components on one tower, or that of each variable, and no strategy
    # is active. Operations that do not update a variable run on the device of
    # the first one.
    known = [*trainable_variables, *optimizer.variables]
    for each in optimizers_in(optimizer):
        known.extend(each._trainable_variables)
    device = home(trainable_variables, 0 if callable(index) else index)
    with (
        compat.single_device_mode(),
        updating(optimizer, shared, only),
        variables_lib.viewed(
            [v for v in known if isinstance(v, keras.Variable)],
            lambda v: component(v, index),
        ),
        tf.device(device),
    ):
        yield
