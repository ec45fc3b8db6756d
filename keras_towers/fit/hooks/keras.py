"""Every Keras name that is patched, and for how long.

The names in ``_install`` are patched while the scope of at least one of our
strategies is active; each patch defers to Keras unless such a strategy is the
current one. The operations that draw random numbers (``fit/step/draws.py``) are
patched while towers run or trace a step. ``tf.random.shuffle`` and the
``random`` module of Keras's ``PyDataset`` adapter are patched while ``fit``
creates its data on several ranks with different seeds (``fit/data/ranks.py``).

Asynchronous towers also patch ``assign_add`` and ``assign_sub`` of Keras
variables (``replicas/asynchronous/update.py``), a worker of parameter servers
``assign`` (``replicas/servers/calls.py``).

All other patches are attributes of a single object, not of a class: model
attributes during a call (``TowerCall.shadows``, ``trainers.without_xla``,
``calls/noop.py``), methods of an optimizer on towers
(``fit/update/optimizers.py``), of a ``SwapEMAWeights`` callback
(``calls/callbacks.py``), and of a ``tf.Variable`` that a step writes
(``weights/spread.py``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit import contract, errors
from keras_towers.fit.calls.call import SeenByKeras
from keras_towers.fit.capture.checks import owner_of
from keras_towers.fit.context import blocks, patches
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.step import batch_norm as batch_norm_lib
from keras_towers.fit.step import logs as logs_lib
from keras_towers.fit.step import whole_batch
from keras_towers.fit.update import optimizers as optimizers_lib
from keras_towers.fit.weights import spread as spread_lib
from keras_towers.fit.weights import variables as variables_lib

logger = logging.getLogger("keras_towers")

_warned_of_threads: set[tuple[str, str]] = set()


def installed() -> contextlib.AbstractContextManager[None]:
    """Patch Keras until the last of all such blocks exits."""
    return patches.held(_install)


def _install() -> None:
    trainer = compat.TensorFlowTrainer
    # Every one of these places the model on the towers first.
    for name in contract.METHODS:
        patches.replace(trainer, name, functools.partial(_method, name))
    # Catches references to Keras's methods taken before the patch.
    patches.replace(trainer, "distribute_strategy", _seen_by_keras)
    # Keras's loops create their iterator by this name.
    patches.replace(compat.trainer_module, "TFEpochIterator", _epoch_iterator)
    # Objects created in a scope belong to its strategy.
    patches.replace(trainer, "__init__", _made_model)
    patches.replace(compat.BaseTrainer, "compile", _compiled)
    patches.replace(compat.BaseOptimizer, "__init__", _made_optimizer)
    patches.replace(compat.KerasVariable, "_initialize", _made_variable)
    # keras.utils.clear_session() calls it, inside the block too.
    patches.replace(tf.compat.v1, "reset_default_graph", _reset_default_graph)
    patches.replace(compat.LoadedFunction, "_call_flat", _call_loaded)
    # An error in a function is that of its caller.
    name, ours = "from_func_graph", errors.shares_rendezvous
    patches.replace(compat.function_module, name, ours)
    # What a step writes has a component on every tower.
    patches.replace(compat.KerasVariable, "_direct_assign", _written)
    patches.replace(compat.SyncOnReadVariable, "assign", _assigned)
    patches.replace(compat.BaseResourceVariable, "handle", spread_lib.handle)
    read = "_read_variable_op"
    patches.replace(compat.BaseResourceVariable, read, spread_lib.read)
    patches.replace(keras.random.SeedGenerator, "next", _next_seed)
    seeds = compat.seed_generator_module
    patches.replace(seeds, "global_seed_generator", _unseeded)
    # A step may use metrics and optimizers that its model does not hold.
    look_up = "__getattribute__"
    metric, optimizer = keras.metrics.Metric, compat.BaseOptimizer
    patches.replace(metric, look_up, logs_lib.attribute_of_metric)
    patches.replace(optimizer, look_up, optimizers_lib.attribute_of_optimizer)
    # Loss denominators have to be those of the global batch.
    losses = compat.loss_module
    patches.replace(losses, "reduce_values", whole_batch.reduce_values)
    patches.replace(losses, "apply_mask", whole_batch.apply_mask)
    name = "_aggregate_additional_loss"
    patches.replace(compat.BaseTrainer, name, whole_batch.additional_loss)
    # Keras divides losses by the replicas, also where none of them runs.
    scaled = whole_batch.scaled_loss
    patches.replace(losses, "scale_loss_for_distribution", scaled)
    patches.replace(losses, "unscale_loss_for_distribution", scaled)
    # Some losses and layers couple the examples of a batch.
    wrapper = compat.LossFunctionWrapper
    patches.replace(wrapper, "call", whole_batch.loss)
    patches.replace(compat.ImageLayer, "call", whole_batch.image_layer)
    text = keras.layers.TextVectorization
    patches.replace(text, "call", whole_batch.text_layer)
    # Statistics may have to be those of the global batch.
    batch_norm = keras.layers.BatchNormalization
    patches.replace(batch_norm, "_moments", batch_norm_lib.moments)
    # A variable on several devices is a number, as one on one device is.
    for name in variables_lib.CONVERSIONS:
        convert = getattr(compat.BaseResourceVariable, name)
        patches.add(compat.DistributedVariable, name, convert)
    # A scalar per batch is weighted by the tower's share of the batch.
    name = "reduce_to_samplewise_values"
    patches.replace(compat.mean_and_sum, name, whole_batch.values_of_metric)


def _method(
    kind: str,
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    strategy = contract.in_force() or contract.owner_of(model)
    in_tower = tf.distribute.get_replica_context() is not None
    if strategy is None or (in_tower and tf.distribute.has_strategy()):
        alone = tower_lib.training_alone
        outer = alone.get()
        trains = None if outer is None else kind in contract.TRAINING
        if strategy is None and kind in contract.TRAINING:
            _warn_of_thread(kind, model)
        with alone.filled(trains):
            return original(model, *args, **kwargs)
    asked = contract.KerasCall.of(kind, original, model, args, kwargs)
    return strategy._components.calls.run(asked)


def _warn_of_thread(kind: str, model: Any) -> None:
    block = blocks.elsewhere()
    if block is None or block in _warned_of_threads:
        return
    _warned_of_threads.add(block)
    logger.warning(
        "%s of model %r runs on one device: the block of %s was entered in "
        "thread %r and holds only there, but this is thread %r. Enter it in "
        "the thread that calls %s.",
        kind,
        model.name,
        *block,
        threading.current_thread().name,
        kind,
    )


def _seen_by_keras(original: Callable[[Any], Any], model: Any) -> Any:
    """Return a proxy that fails if Keras's method was called directly."""
    seen: SeenByKeras | Strategy = original(model)
    if isinstance(seen, SeenByKeras) or not isinstance(
        seen, contract.KerasStrategy
    ):
        return seen
    return SeenByKeras(seen, _Unopened(model))


class _Unopened:
    """Placeholder for a missing call; rejects every use."""

    def __init__(self, model: Any):
        self._model = model

    def iterator(self, **kwargs: Any) -> Any:
        self._refuse()

    def is_step(self, fn: Any) -> bool:
        return True

    def run_step(self, step: Callable[[Any], Any], batch: Any) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TowerError(
            f"a method of model {self._model.name!r} was called bypassing "
            "keras_towers: it was wrapped or stored before the strategy's "
            "block and called inside it. Call the model's own fit, evaluate, "
            "predict, train_on_batch, test_on_batch or predict_on_batch, or "
            "wrap it inside the block."
        )


def _epoch_iterator(
    original: Callable[..., Any],
    *args: Any,
    distribute_strategy: SeenByKeras | Strategy | None = None,
    **kwargs: Any,
) -> Any:
    if isinstance(distribute_strategy, SeenByKeras):
        return distribute_strategy.call.iterator(*args, **kwargs)
    return original(*args, distribute_strategy=distribute_strategy, **kwargs)


def _made_model(
    original: Callable[..., None], model: Any, *args: Any, **kwargs: Any
) -> None:
    original(model, *args, **kwargs)
    strategy = contract.in_force()
    if strategy is not None:
        strategy._components.adoption.created(model)


def _compiled(
    original: Callable[..., None], model: Any, *args: Any, **kwargs: Any
) -> None:
    original(model, *args, **kwargs)
    strategy = contract.in_force()
    if strategy is not None:
        strategy._components.adoption.compiled(model)


def _made_optimizer(
    original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    original(optimizer, *args, **kwargs)
    strategy = contract.in_force()
    if strategy is not None:
        strategy._components.adoption.made_optimizer(optimizer)


def _written(
    original: Callable[[Any, Any], None], variable: Any, value: Any
) -> None:
    """Spread a variable of no model, or a held one, before it is written."""
    tower = tower_lib.current()
    if tower is not None and tower.variables is not None:
        tower.variables.own(variable)
    original(variable, value)


def _assigned(
    original: Callable, variable: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Write a sum of all towers that was made here, outside of a step."""
    # TensorFlow divides it by the replicas, and so rounds integers.
    strategy = contract.in_force()
    across = tf.distribute.in_cross_replica_context()
    is_sum = variable.aggregation == tf.VariableAggregation.SUM
    if strategy is None or not (across and is_sum):
        return original(variable, value, *args, **kwargs)
    first = strategy._components.config.first_tower
    for tower, component in enumerate(variable.values, first):
        with tf.device(component.device):
            mine = value if tower == 0 else tf.zeros_like(value)
            component.assign(mine, read_value=False)
    return variable


def _unseeded(original: Callable[[], Any]) -> Any:
    """Give all towers the same generator for draws without a seed."""
    tower = tower_lib.current()
    if tower is None or tower.unseeded is None:
        return original()
    if tower.unseeded[0] is None:
        with tf.init_scope(), compat.single_device_mode():
            tower.unseeded[0] = original()
    return tower.unseeded[0]


def _next_seed(
    original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Give every tower its own stream of a generator of no model."""
    tower = tower_lib.current()
    if tower is not None and tower.variables is not None:
        tower.variables.own(generator.state, variables_lib.STREAM)
    return original(generator, *args, **kwargs)


def _reset_default_graph(original: Callable[[], None]) -> None:
    """Take the scopes of strategies along into the new default graph."""
    # TensorFlow keeps them in the old one, and they end there.
    scopes = compat.get_default_graph()._thread_local
    original()
    compat.get_default_graph()._thread_local = scopes


def _call_loaded(
    original: Callable[..., Any], function: Any, args: Any, captured: Any
) -> Any:
    """Call a function of a model that was loaded."""
    # On a tower it reads the tower's variables, also if it was loaded before
    # the block. Elsewhere TensorFlow refuses one that was loaded inside; here
    # it reads those of the first tower.
    outside = tf.distribute.get_replica_context() is None
    if not outside and tower_lib.current() is not None:
        # By its handle it would be that of the first tower everywhere.
        owners = ((v.handle, owner_of(v)) for v in function.variables)
        spread = {id(h): owner for h, owner in owners if owner is not None}
        captured = [spread.get(id(item), item) for item in captured]
    elif outside and contract.in_force() is not None:
        captured = [
            item._primary.handle
            if isinstance(item, compat.DistributedVariable)
            else item
            for item in captured
        ]
    return original(function, args, captured)


def _made_variable(
    original: Callable[[Any, Any], None], variable: Any, value: Any
) -> None:
    original(variable, value)
    strategy = contract.in_force()
    if strategy is not None:
        strategy._components.adoption.made_variable(variable)
