"""Calls of Keras's methods with synchronous steps on all towers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.callbacks import Start
from keras_towers.fit.calls import alike, callbacks, chief, suitable
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.calls.call import TowerCall
from keras_towers.fit.context import tower as tower_lib
from keras_towers.fit.contract import TRAINING, TowerConfig
from keras_towers.fit.data import ranks as ranks_lib
from keras_towers.fit.step.global_batch import GlobalStep
from keras_towers.fit.update.reduce import UpdateOnce
from keras_towers.fit.weights.adoption import Adoption


class TowerCalls:
    """Runs Keras's methods on towers.

    Args:
        update: where weights live, and who updates them.

    Attributes:
        adoption: the models placed on the towers.
    """

    def __init__(self, update: UpdateOnce):
        self._config = update.config
        self._step: GlobalStep = GlobalStep(update)
        self.adoption: Adoption = Adoption(self._config, update.spread, update)

    def run(
        self,
        kind: str,
        original: Callable[..., Any],
        model: keras.Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call, as ``keras_towers.fit.contract.Calls``."""
        resuming = callbacks.resuming(original, args, kwargs)
        if resuming is not None:
            with resuming.around():
                start = resuming.begin(self._config.peers)
                kwargs = callbacks.by_name(original, args, kwargs)
                kwargs["initial_epoch"] = start.epoch
                if start.epoch or start.batch:
                    callbacks.warn_of_counters(kwargs)
                return self._start(kind, original, model, (), kwargs, start)
        return self._start(kind, original, model, args, kwargs, None)

    def _config_of(self, kind: str) -> TowerConfig:
        """Return the towers that run a method."""
        return self._config

    @property
    def _alone(self) -> bool:
        """Whether a call runs as plain Keras does."""
        return self._config.num_replicas == 1

    def _start(
        self,
        kind: str,
        original: Callable[..., Any],
        model: keras.Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        start: Start | None,
    ) -> Any:
        if self._alone and start is None:
            self.adoption.refuse_others(model)
            self.adoption.release_model(model)
            return run_alone(kind, original, model, args, kwargs)
        suitable.check(model, self._config)
        outer = call_lib.current()
        if outer is not None:
            outer.settle(kind in TRAINING)
        # Loops over batches call this for every batch: prepare only once.
        prepared = kind.endswith("_on_batch") and self.adoption.knows(
            model, kind
        )
        if outer is None:
            self._config.transport.mark(f"the beginning of {kind}")
        try:
            if outer is None and not prepared:
                config = self._config_of(kind)
                alike.check(config, kind, original, model, args, kwargs)
            with self._config.strategy.scope():
                if not prepared:
                    self.adoption.claim(model)
                if kind in TRAINING:
                    self.adoption.mark_trained()
                elif kind == "evaluate" and outer is None:
                    self.adoption.equalise()
                else:
                    self.adoption.average()
                call = self.open(model, kind, prepared, start)
                with suitable.causes_noted(call):
                    return self._run(call, original, args, kwargs)
        except tf.errors.OpError as error:
            refused, self._step.rows.refused = self._step.rows.refused, None
            if refused is not None:
                raise refused from None
            if not self._step.order.failed(error):
                raise
            raise self._step.order.difference() from None
        finally:
            if outer is not None and outer.trains:
                # The steps that follow are steps of training again.
                self.adoption.mark_trained()
            if outer is None:
                self._config.transport.mark("")

    def open(
        self,
        model: keras.Model,
        kind: str,
        prepared: bool,
        start: Start | None,
    ) -> TowerCall:
        """Create the call object that Keras's loop uses."""
        return TowerCall(
            self._step, self.adoption, model, kind, prepared, start
        )

    def _run(
        self,
        call: TowerCall,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        order: Any = contextlib.nullcontext()
        if call.kind == "fit" and (call.start or self._config.peers.size > 1):
            call.order = ranks_lib.Order(self._config.peers, call.start)
            order = call.order.of_sequences()
        nested = call_lib.current() is not None
        with call.opened():
            if call.kind == "predict_on_batch":
                call.prepare((args or (kwargs["x"],))[:1])
            args, kwargs = chief.arguments(
                self._config, self.adoption, original, args, kwargs, nested
            )
            with (
                order,
                callbacks.on_one_device(original, args, kwargs),
                callbacks.observed(
                    original, call.model, args, kwargs, self._config
                ) as (args, kwargs),
            ):
                return original(call.model, *args, **kwargs)


def run_alone(
    kind: str,
    original: Callable[..., Any],
    model: keras.Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call as plain Keras does, on one device."""
    with (
        compat.single_device_mode(),
        tower_lib.training_alone.filled(kind in TRAINING),
        callbacks.observed(original, model, args, kwargs, None) as (
            args,
            kwargs,
        ),
    ):
        return original(model, *args, **kwargs)
