"""Calls of Keras whose steps do nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.errors import TowerError
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.calls.call import SeenByKeras, refuse_empty
from keras_towers.fit.calls.synchronous import TowerCalls, run_alone
from keras_towers.fit.context import patches
from keras_towers.fit.contract import KerasCall
from keras_towers.fit.update.reduce import WeightUpdate


class NoOpCalls(TowerCalls):
    """Runs Keras's methods, with empty steps for training and validation."""

    # Keras's own method runs epochs, counts steps and calls callbacks; only its
    # iterator and step function are replaced.

    def __init__(self, update: WeightUpdate, logs: Mapping[str, float]):
        # The block may be a trial of what is to be trained after it.
        super().__init__(update, keeps=False)
        self._logs = logs

    @property
    def alone(self) -> bool:
        return False

    def run(self, keras_call: KerasCall) -> Any:
        model, trains = keras_call.model, keras_call.trains
        if "_maybe_symbolic_build" not in vars(model):
            # It is shadowed only during a fit, whose callbacks may call this.
            self.adoption.refuse_others(model)
            self.adoption.release_model(model)
        # Keras passes this argument where fit itself calls evaluate.
        if not trains and not keras_call.arguments.get(
            "_use_cached_eval_dataset"
        ):
            # A callback may call it during fit: undo the shadows of that.
            names = ("_maybe_symbolic_build", "_get_metrics_result_or_logs")
            own = {n: getattr(type(model), n).__get__(model) for n in names}
            with patches.shadowed(model, {"_distribute_strategy": None, **own}):
                return run_alone(keras_call)
        call = _NoOpCall(self._config.strategy, keras_call, self._logs)
        optimizer = getattr(model, "optimizer", None) if trains else None
        ends = {"finalize_variable_values": lambda variables: None}
        with (
            patches.shadowed(model, call.shadows()),
            patches.shadowed(optimizer, ends if optimizer else {}),
        ):
            return run_alone(keras_call)


class _NoOpCall:
    """Replaces Keras's steps during one call."""

    def __init__(
        self,
        strategy: Strategy,
        keras_call: KerasCall,
        logs: Mapping[str, float],
    ):
        self._strategy = strategy
        self._keras_call = keras_call
        self._logs = logs

    def shadows(self) -> dict[str, Any]:
        trains = self._keras_call.trains
        name = "train_function" if trains else "test_function"
        return {
            "_distribute_strategy": SeenByKeras(self._strategy, self),
            "_maybe_symbolic_build": self._begin if trains else _nothing,
            "_get_metrics_result_or_logs": self._report,
            name: self._steps,
            f"make_{name}": _nothing,
        }

    def iterator(self, **kwargs: Any) -> Steps:
        return Steps(**kwargs)

    def is_step(self, fn: Any) -> bool:
        return False

    def _begin(
        self, iterator: Steps | None = None, data_batch: Any = None
    ) -> None:
        kind, model = self._keras_call.kind, self._keras_call.model
        if iterator is not None:
            iterator.refuse_none(kind, model)
        # Callbacks may read the weights; nothing else is used.
        if call_lib.needs_build(model, "predict"):
            batch = data_batch if iterator is None else iterator.spec()
            if batch is not None:
                call_lib.build(model, batch, kind)

    def _report(self, _: Any = None) -> dict[str, float]:
        return dict(self._logs)

    def _steps(self, iterator: Iterator[Any]) -> dict[str, float]:
        steps = itertools.islice(
            iterator, self._keras_call.model.steps_per_execution
        )
        if not sum(1 for _ in steps):
            raise StopIteration
        return self._report()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Steps(compat.TFEpochIterator):
    """Counts the steps of an epoch; reads data only if its size is unknown."""

    data_adapter: Any

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
        # TFEpochIterator.__init__ would make a dataset, which for some kinds
        # of data reads batches.
        super(compat.TFEpochIterator, self).__init__(x=x, **kwargs)
        self._source = self.data_adapter
        batches = self.data_adapter.num_batches
        # Keras treats a negative steps_per_epoch as None.
        self._reads = batches is None and (self.steps_per_epoch or 0) <= 0
        if not self._reads:
            self.data_adapter = _Unread(batches)

    def refuse_none(self, kind: str, model: keras.Model) -> None:
        """Reject training with zero steps an epoch."""
        for name, value in self._given.items():
            if value is not None and value < 0:
                raise TowerError(
                    f"{name}={value!r} is not allowed: give a whole number, 1 "
                    "or more, or None."
                )
        if self.data_adapter.num_batches == 0:
            refuse_empty(kind, model)

    def spec(self) -> Any:
        """Return the element spec of a batch, or None without data."""
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
    """A Keras data adapter for data that is never read."""

    # The original adapter would start prefetching at the start of an epoch.

    def __init__(self, num_batches: int | None):
        self.num_batches = num_batches

    def on_epoch_begin(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        pass
