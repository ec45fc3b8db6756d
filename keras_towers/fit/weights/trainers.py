"""Binding a model's trainer to a strategy, and unbinding it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import keras

from keras_towers import compat
from keras_towers._strategy import Strategy
from keras_towers.fit import told
from keras_towers.fit.contract import METHODS, TowerConfig, home_of

logger = logging.getLogger("keras_towers")


# Calls of one model in two threads may end in any order, and leave these.
_OF_CALLS = (
    "_maybe_symbolic_build",
    "_get_metrics_result_or_logs",
    "_make_function",
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)


def settle(trainer: keras.Model, config: TowerConfig) -> None:
    """Bind a model to a strategy, so that its methods run in the scope."""
    if home_of(trainer) is not config.strategy:
        trainer._distribute_strategy = config.strategy
        drop_functions(trainer)
        run_in_scope(trainer, config)


def run_in_scope(trainer: keras.Model, config: TowerConfig) -> None:
    """Make a model's methods enter the strategy's scope by themselves."""
    for name in METHODS:
        # Bypasses Keras's __setattr__, which tracks attributes.
        vars(trainer)[name] = functools.partial(
            _in_scope, config.strategy, name, trainer
        )


@compat.filter_traceback
def _in_scope(
    strategy: Strategy,
    name: str,
    model: keras.Model,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with strategy.scope():
        return getattr(type(model), name)(model, *args, **kwargs)


def leave(trainer: keras.Model) -> None:
    """Unbind a model from its strategy."""
    trainer._distribute_strategy = None
    drop_functions(trainer)
    vars(trainer).pop("_eval_epoch_iterator", None)
    for name in (*METHODS, *_OF_CALLS):
        vars(trainer).pop(name, None)


def has_keras_step(trainer: keras.Model) -> bool:
    """Whether ``train_step`` is Keras's own, which uses the optimizer once."""
    own = compat.TensorFlowTrainer.train_step
    return getattr(trainer.train_step, "__func__", None) is own


def drop_functions(trainer: keras.Model) -> None:
    """Drop the traced train, test and predict functions."""
    trainer.train_function = None
    trainer.test_function = None
    trainer.predict_function = None


def renew_functions(trainer: keras.Model) -> None:
    """Recreate existing traced functions, for a ``fit`` that is running."""
    for kind in ("train", "test", "predict"):
        if getattr(trainer, f"{kind}_function") is not None:
            getattr(trainer, f"make_{kind}_function")(force=True)


@contextlib.contextmanager
def without_xla(trainer: keras.Model) -> Iterator[None]:
    """Make a model's functions without XLA, which cannot span devices."""
    wanted = trainer._jit_compile
    trainer._jit_compile = False
    try:
        yield
    finally:
        trainer._jit_compile = wanted


def log_without_xla(
    trainer: keras.Model, training: bool, why: str, for_now: bool = False
) -> None:
    """Log that XLA compiles none of a model's steps of a kind; once."""
    # It is a warning where the user has asked for XLA: where Keras would not
    # turn it on by itself.
    kind = "training" if training else "evaluation"
    line = f"jit_compile is off for {kind} of {trainer.name!r} on towers: {why}"
    if told.is_news(line):
        asked = not trainer._resolve_auto_jit_compile()
        level = logging.WARNING if asked and not for_now else logging.INFO
        logger.log(level, "%s", line)
