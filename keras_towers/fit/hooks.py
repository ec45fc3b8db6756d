"""What is patched in Keras, and for how long.

While at least one scope of a tower strategy is entered, these names of Keras
are ours; each does exactly what Keras does unless a tower strategy is in force:

* the trainer's ``fit``, ``evaluate``, ``predict`` and ``*_on_batch``, which
  adopt the model first;
* the trainer's ``_maybe_symbolic_build`` and ``make_predict_function``, which
  put the variables on the towers once all of them exist;
* the trainer's ``make_train_function``, for asynchronous towers;
* the trainer's ``_get_metrics_result_or_logs``, the end of an epoch's steps;
* the trainer module's ``TFEpochIterator``, which makes batches for towers;
* what ``OPTIMIZER_METHODS`` names, of every optimizer class;
* ``update_step`` of ``SGD``, in fewer operations;
* ``assign`` of variables, to know what steps write, and ``assign_add`` and
  ``assign_sub``, while towers share them;
* ``on_epoch_end`` of ``TensorBoard``, which writes the staleness too;
* two methods of ``SwapEMAWeights``, which write weights and averages;
* the makers of trainers, optimizers and variables, to know what is made inside;
* ``update_state`` of ``Mean`` and ``Sum``, for one number a batch;
* two functions of ``keras.losses`` that divide by numbers of examples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit import (
    assignments,
    asynchronous,
    building,
    chief,
    epochs,
    fused,
    patches,
    shards,
    shared,
    staleness,
    step,
)
from keras_towers.fit import losses as losses_lib
from keras_towers.fit import metrics as metrics_lib
from keras_towers.fit import optimizer as optimizer_lib
from keras_towers.fit import session as session_lib
from keras_towers.fit import tower as tower_lib
from keras_towers.fit.session import Session

METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)

OPTIMIZER_METHODS = {
    "apply": optimizer_lib.apply,
    "apply_gradients": optimizer_lib.apply_gradients,
    "scale_loss": optimizer_lib.scale_loss,
    "_all_reduce_sum_gradients": optimizer_lib.sum_over_replicas,
    "finalize_variable_values": optimizer_lib.finalize_variable_values,
    "assign_add": assignments.assign_add,
    "assign_sub": assignments.assign_sub,
}


def installed() -> contextlib.AbstractContextManager[None]:
    """Patch Keras for as long as this, or any other one like it, is entered."""
    return patches.held(_install)


def _install() -> None:
    trainer = compat.TensorFlowTrainer
    for name in METHODS:
        patches.replace(trainer, name, functools.partial(_method, name))
    patches.replace(trainer, "_maybe_symbolic_build", _maybe_symbolic_build)
    patches.replace(trainer, "make_predict_function", _make_predict_function)
    patches.replace(trainer, "make_train_function", _make_train_function)
    patches.replace(trainer, "_get_metrics_result_or_logs", _end_of_steps)
    patches.replace(trainer, "__init__", _created_in_scope)
    patches.replace(compat.trainer_module, "TFEpochIterator", _epoch_iterator)
    patches.replace(
        compat.loss_module, "reduce_values", losses_lib.reduce_values
    )
    patches.replace(compat.loss_module, "apply_mask", losses_lib.apply_mask)
    for metric in (keras.metrics.Mean, keras.metrics.Sum):
        patches.replace(metric, "update_state", metrics_lib.update_state)
    for name in ("_tf_swap_variables", "_tf_finalize_ema_values"):
        patches.replace(
            keras.callbacks.SwapEMAWeights, name, optimizer_lib.on_one_device
        )
    patches.replace(compat.BaseOptimizer, "__init__", _optimizer_created)
    patches.replace(keras.optimizers.SGD, "update_step", fused.update_step)
    patches.replace(compat.KerasVariable, "_initialize", _variable_created)
    patches.replace(compat.KerasVariable, "assign", shared.assign)
    patches.replace(compat.KerasVariable, "assign_add", shared.assign_add)
    patches.replace(compat.KerasVariable, "assign_sub", shared.assign_sub)
    patches.replace(
        keras.callbacks.TensorBoard, "on_epoch_end", staleness.to_tensorboard
    )
    _install_optimizers()


def _install_optimizers() -> None:
    """Patch all classes of optimizers, also those defined since then."""
    for owner in patches.with_subclasses(compat.BaseOptimizer):
        for name, ours in OPTIMIZER_METHODS.items():
            if name in vars(owner):
                patches.replace(owner, name, ours)


def _optimizer_created(
    original: Callable, optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    original(optimizer, *args, **kwargs)
    strategy = _tower_strategy()
    if strategy is not None:
        strategy.adoption.made_optimizer(optimizer)


def _variable_created(original: Callable, variable: Any, value: Any) -> None:
    original(variable, value)
    strategy = _tower_strategy()
    if strategy is not None:
        strategy.adoption.made_variable(variable)


def _tower_strategy(model: Any = None) -> Any:
    """The tower strategy that is in force here, or that owns the model."""
    current = tf.distribute.get_strategy()
    owner = getattr(model, "_distribute_strategy", None)
    for strategy in (current, owner):
        if getattr(strategy, "adopts_models", False):
            return strategy
    return None


def _method(
    kind: str, original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    strategy = _tower_strategy(model)
    in_tower = tf.distribute.get_replica_context() is not None
    trains = kind in session_lib.TRAINING
    if strategy is None or (in_tower and tf.distribute.has_strategy()):
        with tower_lib.alone(trains, begins=False):
            return original(model, *args, **kwargs)
    _install_optimizers()
    start, args, kwargs = chief.start(original, args, kwargs)
    if strategy.call is not None:
        return strategy.call(kind, original, model, args, kwargs)
    if strategy.num_replicas == 1 and start is None:
        strategy.adoption.refuse_others(model)
        strategy.adoption.release_model(model)
        with compat.single_device_mode(), tower_lib.alone(trains):
            return original(model, *args, **kwargs)
    outer = session_lib.current()
    if outer is not None:
        outer.settle()
    # A loop over batches calls this for every one.
    prepared = kind.endswith("_on_batch") and strategy.adoption.knows(
        model, kind
    )
    with strategy.scope():
        if not prepared:
            strategy.adoption.claim(model)
        if trains:
            strategy.adoption.trained = True
        else:
            strategy.adoption.equalise()
        session = Session(model, kind, prepared, start=start)
        order = contextlib.nullcontext()
        if kind == "fit" and (start or strategy.transport.size > 1):
            session.order = shards.Order(strategy.transport, start)
            order = session.order.of_sequences()
        try:
            with session_lib.opened(session):
                if kind == "predict_on_batch":
                    building.prepare(
                        strategy, session, (args or (kwargs["x"],))[:1]
                    )
                args, kwargs = chief.arguments(strategy, original, args, kwargs)
                with order:
                    return original(model, *args, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            if not strategy.lockstep.failed(error):
                raise
            raise strategy.lockstep.difference() from None
        finally:
            if outer is None:
                strategy.transport.mark("")


def _created_in_scope(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> None:
    """Hook a model that is built in a scope for life.

    It may be trained outside the scope, when nothing is patched.
    """
    original(model, *args, **kwargs)
    strategy = _tower_strategy()
    if strategy is None:
        return
    strategy.adoption.created(model)
    hook(strategy, model)


def hook(strategy: Any, model: Any) -> None:
    """Run the model's methods in the strategy's scope, wherever called."""
    for name in METHODS:
        vars(model)[name] = functools.partial(_in_scope, strategy, name, model)


def _in_scope(
    strategy: Any, name: str, model: Any, *args: Any, **kwargs: Any
) -> Any:
    with strategy.scope():
        return getattr(type(model), name)(model, *args, **kwargs)


def unhook(model: Any) -> None:
    """Take back what ``_created_in_scope`` did."""
    for name in METHODS:
        vars(model).pop(name, None)


def _maybe_symbolic_build(
    original: Callable, model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    session = session_lib.current()
    if session is None or session.model is not model:
        original(model, iterator=iterator, data_batch=data_batch)
        return
    if iterator is not None:
        data_batch = building.batch_spec(iterator)
    building.prepare(tf.distribute.get_strategy(), session, data_batch)


def _make_train_function(
    original: Callable, model: Any, force: bool = False
) -> None:
    session = session_lib.current()
    strategy = tf.distribute.get_strategy()
    if (
        session is not None
        and session.model is model
        and getattr(strategy, "asynchronous", False)
    ):
        asynchronous.make_train_function(strategy, session, force)
    else:
        original(model, force)


def _make_predict_function(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    session = session_lib.current()
    if session is not None and session.epoch_iterator is not None:
        spec = building.batch_spec(session.epoch_iterator)
        building.prepare(tf.distribute.get_strategy(), session, spec)
    return original(model, *args, **kwargs)


def _epoch_iterator(
    original: Callable, *args: Any, distribute_strategy: Any = None, **kwargs
) -> Any:
    own = getattr(distribute_strategy, "epoch_iterator", None)
    if own is not None:
        return own(*args, **kwargs)
    session = session_lib.current()
    if session is None or not getattr(
        distribute_strategy, "adopts_models", False
    ):
        return original(
            *args, distribute_strategy=distribute_strategy, **kwargs
        )
    # The second one of a fit is for validation.
    first = session.epoch_iterator is None
    kind = session.kind if first else "evaluate"
    iterator = epochs.TowerEpochIterator(
        distribute_strategy, kind, session.order, **kwargs
    )
    if kind == "fit" and session.start is not None:
        iterator.skip_to(session.start)
    if first:
        session.epoch_iterator = iterator
    return iterator


def _end_of_steps(original: Callable, model: Any, logs: Any) -> Any:
    session = session_lib.current()
    if session is not None and session.model is model:
        tf.distribute.get_strategy().transport.mark(f"end of {session.kind}")
        iterator = session.epoch_iterator
        logs = asynchronous.end_of_steps(session, logs)
        if not logs and iterator is not None and iterator.was_empty():
            session_lib.refuse_empty(session.kind, model)
        strategy = tf.distribute.get_strategy()
        if session.kind == "fit" and strategy.sync_every_epoch:
            strategy.adoption.equalise()
            strategy.adoption.hand_out(model)
            strategy.adoption.trained = True
        return step.epoch_logs(strategy, session, original(model, logs))
    return original(model, logs)
