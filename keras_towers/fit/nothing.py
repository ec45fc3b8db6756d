"""Calls of Keras whose steps do nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.errors import TowerError
from keras_towers.fit import building, patches
from keras_towers.fit import session as session_lib
from keras_towers.fit import tower as tower_lib


def call(
    strategy: Any,
    logs: Mapping[str, float],
    kind: str,
    original: Callable,
    model: keras.Model,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Call a method of Keras; one that trains, and validation, does nothing.

    The method itself is Keras's own: it runs its epochs, counts its steps and
    calls its callbacks, over an iterator and with a step function of ours.

    Args:
        strategy: the strategy.
        logs: what every step reports.
        kind: the name of the method.
        original: the method, as Keras has it.
        model: the model whose method is called.
        args: what the user gave.
        kwargs: what the user gave by name.

    Raises:
        TowerError: the model lives on another strategy, or there is not one
            step to train.
    """
    if "_maybe_symbolic_build" not in vars(model):
        # Not in the middle of a fit already, called by one of its callbacks.
        strategy.adoption.refuse_others(model)
        strategy.adoption.release_model(model)
    trains = kind in session_lib.TRAINING
    # Keras says so where fit itself calls evaluate.
    validates = bool(kwargs.get("_use_cached_eval_dataset"))

    def begin(iterator: Steps | None = None, data_batch: Any = None) -> None:
        if not trains:
            return
        if iterator is not None:
            iterator.refuse_none(kind, model)
        # Callbacks want the weights; nothing else of the model is used.
        if building.needs_build(model, "predict"):
            batch = data_batch if iterator is None else iterator.spec()
            if batch is not None:
                building.build(model, batch, kind)

    def report(_: Any = None) -> dict[str, float]:
        return dict(logs)

    def nothing(iterator: Iterator[Any]) -> dict[str, float]:
        steps = itertools.islice(iterator, model.steps_per_execution)
        if not sum(1 for _ in steps):
            raise StopIteration
        return report()

    if trains or validates:
        name = "train_function" if trains else "test_function"
        shadows = {
            "_distribute_strategy": strategy,
            "_maybe_symbolic_build": begin,
            "_get_metrics_result_or_logs": report,
            name: nothing,
            f"make_{name}": lambda force=False: None,
        }
    else:
        # What it is outside of a fit, in the middle of which this may be.
        shadows = {
            "_distribute_strategy": None,
            **{
                name: getattr(type(model), name).__get__(model)
                for name in (
                    "_maybe_symbolic_build",
                    "_get_metrics_result_or_logs",
                )
            },
        }
    optimizer = getattr(model, "optimizer", None)
    ends = {"finalize_variable_values": lambda variables: None}
    with (
        compat.single_device_mode(),
        tower_lib.alone(trains),
        patches.shadowed(model, shadows),
        patches.shadowed(optimizer, ends if trains and optimizer else {}),
    ):
        return original(model, *args, **kwargs)


class Steps(compat.TFEpochIterator):
    """Counts the steps of an epoch; reads data only to find an unknown end.

    Args:
        x: the data, as for ``fit``, or None.
        **kwargs: for Keras's own iterator.

    Raises:
        TowerError: neither data nor a number of steps.
    """

    def __init__(self, x: Any = None, **kwargs: Any):
        self._given = {
            name: kwargs.get(name) for name in ("steps_per_epoch", "batch_size")
        }
        self._has_data = x is not None
        if x is None:
            if not kwargs.get("steps_per_epoch"):
                raise TowerError(
                    "fit was given neither data nor a number of steps: give "
                    "steps_per_epoch, or data to count the steps of."
                )
            x = tf.data.Dataset.from_tensors(0).repeat()
            kwargs["shuffle"] = False
        # TFEpochIterator would turn it into a dataset, for which Keras has to
        # look at batches of some kinds of data.
        super(compat.TFEpochIterator, self).__init__(x=x, **kwargs)
        self._source = self.data_adapter
        batches = self.data_adapter.num_batches
        # Keras takes a negative number of steps for none.
        self._reads = batches is None and (self.steps_per_epoch or 0) <= 0
        if not self._reads:
            self.data_adapter = _Unread(batches)

    def refuse_none(self, kind: str, model: keras.Model) -> None:
        """Refuse to train where an epoch would have no step.

        Args:
            kind: the method that trains.
            model: the model that it is called on.

        Raises:
            TowerError: empty data, or a negative number.
        """
        for name, value in self._given.items():
            if value is not None and value < 0:
                raise TowerError(
                    f"{name}={value!r} is not allowed: give a whole number, 1 "
                    "or more, or None."
                )
        if self.data_adapter.num_batches == 0:
            session_lib.refuse_empty(kind, model)

    def spec(self) -> Any:
        """Shapes and dtypes of a batch, or None where there is no data."""
        if not self._has_data:
            return None
        return self._source.get_tf_dataset().element_spec

    def _get_iterator(self) -> Any:
        if self._reads:
            return self.data_adapter.get_tf_dataset()
        batches = self.data_adapter.num_batches
        if batches is None:
            return itertools.repeat(None)
        return itertools.repeat(None, batches)


class _Unread:
    """A data adapter of Keras for data that nobody reads.

    The data itself would read ahead if it were told of an epoch.
    """

    def __init__(self, num_batches: int | None):
        self.num_batches = num_batches

    def on_epoch_begin(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        pass
