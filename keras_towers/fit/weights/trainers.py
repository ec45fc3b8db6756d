"""What is Keras's own in a model that lives on a strategy, and what is not."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_towers.fit.contract import METHODS, TowerConfig, home_of

logger = logging.getLogger("keras_towers")

_xla_logged: set[str] = set()


def settle(trainer: keras.Model, config: TowerConfig) -> None:
    """Let a model live on a strategy: its methods run in the scope."""
    if home_of(trainer) is not config.strategy:
        trainer._distribute_strategy = config.strategy
        drop_functions(trainer)
        run_in_scope(trainer, config)


def run_in_scope(trainer: keras.Model, config: TowerConfig) -> None:
    """Run a model's methods in the strategy's scope, wherever called."""
    for name in METHODS:
        # Past Keras's __setattr__, which tracks what a model is given.
        vars(trainer)[name] = functools.partial(
            _in_scope, config.strategy, name, trainer
        )


def _in_scope(
    strategy: tf.distribute.Strategy,
    name: str,
    model: keras.Model,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with strategy.scope():
        return getattr(type(model), name)(model, *args, **kwargs)


def leave(trainer: keras.Model) -> None:
    """Make a model one that lives nowhere in particular."""
    trainer._distribute_strategy = None
    drop_functions(trainer)
    vars(trainer).pop("_eval_epoch_iterator", None)
    for name in METHODS:
        vars(trainer).pop(name, None)


def drop_functions(trainer: keras.Model) -> None:
    """Forget what was traced."""
    trainer.train_function = None
    trainer.test_function = None
    trainer.predict_function = None


def renew_functions(trainer: keras.Model) -> None:
    """Forget what was traced; a running ``fit`` goes on with the new ones."""
    for kind in ("train", "test", "predict"):
        if getattr(trainer, f"{kind}_function") is not None:
            getattr(trainer, f"make_{kind}_function")(force=True)


@contextlib.contextmanager
def without_xla(trainer: keras.Model) -> Iterator[None]:
    """Trace a model's steps without XLA, which knows no step on many devices.

    What was asked for is given back at the end, unless the model was compiled
    anew meanwhile.
    """
    wanted = trainer._jit_compile
    compiled = getattr(trainer, "_compile_config", None)
    if wanted and trainer.name not in _xla_logged:
        _xla_logged.add(trainer.name)
        logger.info(
            "jit_compile is off for %s on towers: XLA cannot compile a step "
            "that spans devices",
            trainer.name,
        )
    trainer._jit_compile = False
    try:
        yield
    finally:
        if getattr(trainer, "_compile_config", None) is compiled:
            trainer._jit_compile = wanted
