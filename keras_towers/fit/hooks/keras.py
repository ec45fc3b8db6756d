"""Every name of Keras that is replaced, and for how long.

While at least one scope of a strategy of ours is entered, the names in
``_install`` are ours; each does exactly what Keras does unless such a strategy
is in force. Besides them, for a job of several ranks that were not seeded
alike, ``tf.random.shuffle`` and the ``random`` of Keras's module for
``PyDataset`` are replaced while a call of ``fit`` makes its data
(``fit/data/ranks.py``).

All else that is ours is an attribute of one object, not of a class: the names
of a model that a call shadows (``TowerCall.shadows``), the methods of an
optimizer that lives on towers (``optimizers.py`` and ``one_device.py`` of
``fit/update/``), and the writes of a variable that asynchronous towers share
(``fit/asynchronous/update.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import contract
from keras_towers.fit.calls.call import SeenByKeras
from keras_towers.fit.context import patches
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.step import losses as losses_lib
from keras_towers.fit.step import metrics as metrics_lib
from keras_towers.fit.update import optimizers as optimizers_lib


def installed() -> contextlib.AbstractContextManager[None]:
    """Replace the names for as long as this, or any other one, is entered."""
    return patches.held(_install)


def _install() -> None:
    trainer = compat.TensorFlowTrainer
    # Whoever calls these, the model is put on the towers first.
    for name in contract.METHODS:
        patches.replace(trainer, name, functools.partial(_method, name))
    # A method of Keras that is reached past ours must not go on.
    patches.replace(trainer, "distribute_strategy", _seen_by_keras)
    # Keras's loops make it by this name: batches for towers.
    patches.replace(compat.trainer_module, "TFEpochIterator", _epoch_iterator)
    # What is made in a scope lives on the towers.
    patches.replace(trainer, "__init__", _made_model)
    patches.replace(compat.BaseOptimizer, "__init__", _made_optimizer)
    patches.replace(compat.KerasVariable, "_initialize", _made_variable)
    # Optimizers that were made elsewhere, and are called on a tower.
    for owner in patches.with_subclasses(compat.BaseOptimizer):
        if "apply" in vars(owner):
            patches.replace(owner, "apply", optimizers_lib.apply_of_any)
    # Functions that divide by numbers of examples.
    losses = compat.loss_module
    patches.replace(losses, "reduce_values", losses_lib.reduce_values)
    patches.replace(losses, "apply_mask", losses_lib.apply_mask)
    # One number a batch counts for the tower's part of it.
    for metric in (keras.metrics.Mean, keras.metrics.Sum):
        patches.replace(metric, "update_state", metrics_lib.update_state)


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
        with alone.filled(trains):
            return original(model, *args, **kwargs)
    return strategy.calls.run(kind, original, model, args, kwargs)


def _seen_by_keras(original: Callable[[Any], Any], model: Any) -> Any:
    """Refuse what goes on in a method of Keras that no call was opened for."""
    seen = original(model)
    if isinstance(seen, SeenByKeras) or not isinstance(
        seen, contract.KerasStrategy
    ):
        return seen
    return SeenByKeras(seen, _Unopened(model))


class _Unopened:
    """Stands for the call that should have been opened."""

    def __init__(self, model: Any):
        self._model = model

    def iterator(self, **kwargs: Any) -> Any:
        self._refuse()

    def run_step(self, step: Callable[[Any], Any], batch: Any) -> Any:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TowerError(
            f"a method of model {self._model.name!r} was called past "
            "keras_towers: something took hold of it before the strategy's "
            "block, and calls it inside. Call the model's own fit, evaluate, "
            "predict, train_on_batch, test_on_batch or predict_on_batch, or "
            "wrap it inside the block."
        )


def _epoch_iterator(
    original: Callable[..., Any],
    *args: Any,
    distribute_strategy: Any = None,
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
        strategy.adoption.created(model)


def _made_optimizer(
    original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any
) -> None:
    original(optimizer, *args, **kwargs)
    strategy = contract.in_force()
    if strategy is not None:
        strategy.adoption.made_optimizer(optimizer)


def _made_variable(
    original: Callable[[Any, Any], None], variable: Any, value: Any
) -> None:
    original(variable, value)
    strategy = contract.in_force()
    if strategy is not None:
        strategy.adoption.made_variable(variable)
