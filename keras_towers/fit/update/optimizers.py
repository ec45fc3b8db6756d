"""Optimizers on towers: an update on one tower, as on one device.

While a strategy is active, the methods of every optimizer are looked up here:
``apply`` passes gradients to the update of the strategy. The optimizer keeps
its class. The update itself runs on a single tower, by fewer operations than in
Keras:

* SGD updates a weight by one fused operation instead of five passes over it.
  TensorFlow's Adam kernel is not used: it computes ``1 - beta_2`` in single
  precision, so weights would differ from the weights on one device.
* When a step with many weights is traced, most of the time is spent in the
  Python code of ``update_step``. For optimizers whose operations are the same
  for all shapes, this code runs for one weight, and its operations are then
  repeated for the other weights, as are those of weight decay. Operations that
  depend on no weight, such as the corrected learning rate of Adam, are shared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit import components
from keras_towers.fit.components import ApplyCall, name_of
from keras_towers.fit.context import patches, thread_state
from keras_towers.fit.context.thread_state import ThreadLocal
from keras_towers.fit.weights.copies import (
    copy_on_tower,
    copy_to_towers,
    is_copied,
    native,
)
from keras_towers.fit.weights.model_state import (
    lists_by_weight,
    optimizers_in,
    trained_by,
)
from keras_towers.fit.weights.shards import ShardedVariable
from keras_towers.fit.weights.tower_variables import with_values
from keras_towers.foundation import compat
from keras_towers.foundation.tf_strategy import Strategy

_updating: ThreadLocal[bool] = ThreadLocal()


def apply(
    optimizer: Any,
    original: patches.Original,
    grads: Sequence[Any],
    trainable_variables: Sequence[Any] | None = None,
) -> None:
    """Replacement for ``apply``: sums the gradients of towers first."""
    handle = _current_update_handler()
    if handle is None:
        original(grads, trainable_variables)
        return

    named = trainable_variables
    variables = list(optimizer._trainable_variables if named is None else named)
    names = tuple(map(name_of, variables))
    call = ApplyCall(names, list(grads), optimizer, original, variables)
    if thread_state.current_step() and all(grad is None for grad in call.grads):
        # Keras raises its own error.
        original(grads, trainable_variables)
    else:
        handle(call)


def _current_update_handler() -> Callable[[ApplyCall], None] | None:
    """Return the handler of ``apply`` here; None: Keras handles it."""
    step, strategy = thread_state.current_step(), components.active_strategy()
    if step is not None:
        return step.apply if step.takes_updates else None
    if strategy is None:
        return None
    update = strategy._update
    # Replicas' gradients are summed; outside of them there is nothing to sum.
    across = tf.distribute.in_cross_replica_context()
    return update.apply_outside if across else update.apply_in_replica


def _build(
    optimizer: Any, original: patches.Original, variables: Sequence[Any]
) -> None:
    strategy = components.active_strategy()
    across = tf.distribute.in_cross_replica_context()
    if strategy is None or not across or optimizer.built:
        original(variables)
        return
    strategy._update.make_ready(optimizer, list(variables), in_apply=False)


def _finalize_variable_values(
    optimizer: Any, original: patches.Original, variables: Sequence[Any]
) -> None:
    if components.active_strategy() is None:
        original(variables)
        return
    with as_one_device(optimizer, variables):
        original(variables)
    copy_to_towers(variables)


_METHODS: patches.Shadows = {
    "apply": apply,
    "build": _build,
    "finalize_variable_values": _finalize_variable_values,
}


def attribute_of_optimizer(
    original: patches.Original, optimizer: Any, name: str
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

    def __init__(self, default: Strategy):
        self._default = default
        self.extended = self

    def colocate_vars_with(self, variable: Any) -> Any:
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
    tower: int = 0,
    fuses: bool = True,
) -> Iterator[None]:
    """Run an optimizer as if its variables existed only once.

    In this block, the Keras variables of the model and of the optimizer resolve
    to their copies on one tower, and no strategy is active. Operations that do
    not update a variable run on the device of the first weight. The optimizer,
    and any optimizer that it wraps, use fewer operations than in Keras.

    Args:
        optimizer: the optimizer.
        trainable_variables: the weights that it updates.
        tower: the tower.
        fuses: whether operations may be fused. No rule divides a fused one, and
            in a branch it would keep all of the branch from being divided.
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
        device = copy_on_tower(native(first), tower).device
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.single_device_mode())
        stack.enter_context(_updating.holding(True))
        default = _InPlaceStrategy(tf.distribute.get_strategy())
        for part in optimizers_in(optimizer):
            replaced = patches.bind_to(part, _fewer_operations(part, fuses))
            replaced["_distribution_strategy"] = default
            stack.enter_context(patches.shadowed(part, replaced))
        values = ((v, copy_on_tower(v._value, tower)) for v in variables)
        stack.enter_context(with_values(values))
        stack.enter_context(tf.device(device))
        yield


_REPEATED = frozenset(
    {
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Adam,
        keras.optimizers.Adamax,
        keras.optimizers.AdamW,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
        keras.optimizers.Nadam,
        keras.optimizers.RMSprop,
    }
)

_apply_weight_decay = keras.optimizers.Optimizer._apply_weight_decay


def _fewer_operations(optimizer: Any, fuses: bool) -> patches.Shadows:
    """Return replacements for an optimizer's methods, for one ``apply``."""
    methods: dict[str, Callable[..., Any]] = {
        "_all_reduce_sum_gradients": _skip_all_reduce
    }
    repeated = _Repeated()
    if type(optimizer).update_step is keras.optimizers.SGD.update_step:
        if fuses:
            methods["update_step"] = _fused_step
    elif repeats(optimizer):
        methods["update_step"] = repeated.update_step
    if type(optimizer)._apply_weight_decay is _apply_weight_decay:
        methods["_apply_weight_decay"] = repeated.apply_weight_decay
    return methods


def repeats(optimizer: Any) -> bool:
    """Whether an optimizer is known to update all weights in the same way."""
    # A custom rule may depend on the name of a weight.
    overridden = "update_step" in vars(optimizer)
    return not overridden and type(optimizer) in _REPEATED


def _is_plain(variable: Any) -> bool:
    """Whether a variable is an ordinary one, with its value at its handle."""
    has_parts = is_copied(variable) or isinstance(variable, ShardedVariable)
    return isinstance(variable, tf.Variable) and not has_parts


def _skip_all_reduce(
    optimizer: Any, original: patches.Original, grads_and_vars: Any
) -> Any:
    """Skip TensorFlow's all-reduce, which is the identity on one replica.

    It registers a custom gradient that TensorFlow never frees, which would keep
    the graph of every trace in memory.
    """
    return list(grads_and_vars)


def _fused_step(
    optimizer: keras.optimizers.SGD,
    original: patches.Original,
    gradient: Any,
    variable: Any,
    learning_rate: Any,
) -> None:
    """Replacement for ``SGD.update_step``, by one operation if it is dense."""
    slot: Any = None
    if optimizer.momentum != 0:
        index = optimizer._get_variable_index(variable)
        slot = optimizer.momentums[index]._value
    if (
        isinstance(gradient, tf.IndexedSlices)
        or not _is_plain(variable)
        # XLA fuses the passes itself.
        or compat.in_xla_context(compat.get_default_graph())
        or variable.dtype not in (tf.float32, tf.float64)
    ):
        original(gradient, variable, learning_rate)
        return
    # Asynchronous towers may write the same weight concurrently.
    where = {"var": variable.handle, "use_locking": True}
    gradient = tf.cast(gradient, variable.dtype)
    learning_rate = tf.cast(learning_rate, variable.dtype)
    if slot is None:
        tf.raw_ops.ResourceApplyGradientDescent(
            alpha=learning_rate, delta=gradient, **where
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        accum=slot.handle,
        lr=learning_rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
        **where,
    )


class _Repeated:
    """Methods of an optimizer, traced once for similar weights."""

    def __init__(self) -> None:
        self._recordings: dict[Any, RecordedOperations] = {}

    def update_step(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: patches.Original,
        gradient: Any,
        variable: Any,
        learning_rate: Any,
    ) -> None:
        """Update a weight, with the operations of an earlier one if it can."""
        update = functools.partial(original, gradient, variable, learning_rate)
        is_dense = isinstance(gradient, tf.Tensor) and (
            gradient.shape == variable.shape
        )
        if not is_dense:
            update()
            return
        index = optimizer._get_variable_index(variable)
        slots = [slots[index] for slots in lists_by_weight(optimizer)]
        values = [None if slot is None else slot._value for slot in slots]
        self._run(update, id(learning_rate), variable, [gradient, *values])

    def apply_weight_decay(
        self,
        optimizer: keras.optimizers.Optimizer,
        original: patches.Original,
        variables: Sequence[Any],
    ) -> None:
        """Decay weights, with the operations of an earlier one if it can."""
        if optimizer.weight_decay is None:
            return
        for weight in variables:
            is_keras = isinstance(weight, keras.Variable)
            variable = weight.value if is_keras else weight
            if optimizer._use_weight_decay(variable):
                decay = functools.partial(original, [weight])
                self._run(decay, None, variable, [])

    def _run(
        self,
        function: Callable[[], None],
        kind: int | None,
        variable: Any,
        others: Sequence[Any],
    ) -> None:
        """Run a function of a weight, or repeat its operations.

        Args:
            function: changes the weight.
            kind: differs for functions with different operations.
            variable: the weight.
            others: further tensors and variables that differ between weights.
        """
        step = thread_state.current_step()
        is_alone = _is_plain(variable) or (step and not is_copied(variable))
        if tf.executing_eagerly() or not is_alone:
            function()
            return
        changing = [variable, *others]
        inputs = [getattr(g, "handle", g) for g in changing if g is not None]
        graph = compat.get_default_graph()
        like = [g if g is None else (g.dtype, g.device) for g in changing]
        key = id(graph), kind, *like
        recording = self._recordings.get(key)
        if recording is not None and recording.repeats:
            # A trace that makes variables never runs.
            if not (
                step and step.first_call and step.first_call.makes_variables
            ):
                recording.repeat(inputs)
            return
        begin = len(graph.get_operations())
        function()
        if recording is None:
            recording = RecordedOperations(
                graph, begin, inputs, variable.device
            )
            self._recordings[key] = recording


class RecordedOperations:
    """The newest operations of a graph that depend on given inputs.

    The ``inputs`` and the ``device`` differ in every repetition. Operations can
    be repeated if the operations that depend on no input are stateless, or read
    scalar variables.
    """

    def __init__(
        self, graph: Any, begin: int, inputs: Sequence[tf.Tensor], device: str
    ):
        self.graph = graph
        self._inputs = [graph.capture(tensor) for tensor in inputs]
        self._steps: list[tuple[Any, dict[str, Any], str | None]] = []
        self.repeats = True
        changing = set(map(id, self._inputs))
        repeated: set[Any] = set()
        for operation in graph.get_operations()[begin:]:
            if changing.isdisjoint(map(id, operation.inputs)):
                self.repeats &= _is_reusable(operation)
                continue
            self.repeats &= repeated.isdisjoint(operation.control_inputs)
            repeated.add(operation)
            changing.update(map(id, operation.outputs))
            attributes = dict(operation.node_def.attr)
            # The colocation group, which the device makes redundant.
            attributes.pop("_class", None)
            elsewhere = operation.device not in ("", device)
            self._steps.append(
                (operation, attributes, operation.device if elsewhere else None)
            )

    def repeat(self, inputs: Sequence[tf.Tensor]) -> None:
        """Add the operations again in this graph, with N new inputs."""
        graph = self.graph
        now = {
            id(old): graph.capture(new)
            for old, new in zip(self._inputs, inputs, strict=True)
        }
        for operation, attributes, device in self._steps:
            with tf.device(device) if device else contextlib.nullcontext():
                new_inputs = [now.get(id(old), old) for old in operation.inputs]
                copy = graph.create_op(
                    operation.type,
                    new_inputs,
                    [output.dtype for output in operation.outputs],
                    attrs=attributes,
                    op_def=operation.op_def,
                )
            for old, new in zip(operation.outputs, copy.outputs, strict=True):
                now[id(old)] = new


def _is_reusable(operation: Any) -> bool:
    """Whether an operation's result is valid in every repetition."""
    if operation.type == "ReadVariableOp":
        return operation.outputs[0].shape.rank == 0
    return not operation.op_def.is_stateful
