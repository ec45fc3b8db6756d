"""Binding a model's trainer to a strategy, and unbinding it."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_towers import compat
from keras_towers._notices import announce, first_time
from keras_towers.fit.context import patches
from keras_towers.fit.context.by_identity import ByIdentity
from keras_towers.fit.contract import (
    METHODS,
    TRAINING,
    TowerConfig,
    home_of,
    in_force,
    owner_of,
)

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

_RESOLVE = "_resolve_auto_jit_compile"

# The towers on which models train outside of any block, too.
_homes: ByIdentity[keras.Model, TowerConfig] = ByIdentity()
_announced: weakref.WeakSet[keras.Model] = weakref.WeakSet()
# Those that are there now, until a block takes them.
_at_home: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def bind(trainer: keras.Model, config: TowerConfig) -> None:
    """Bind a model to a strategy, so that its methods run in the scope."""
    if home_of(trainer) is not config.strategy:
        trainer._distribute_strategy = config.strategy
        drop_functions(trainer)
        enter_scope_in_methods(trainer, config)


def enter_scope_in_methods(trainer: keras.Model, config: TowerConfig) -> None:
    """Make a model of a strategy behave in its scope and outside."""
    run_in_scope(trainer, config)
    vars(trainer)[_RESOLVE] = functools.partial(_resolve_auto, trainer)


def _resolve_auto(trainer: keras.Model) -> bool:
    """Resolve ``jit_compile="auto"`` as Keras does without a strategy."""
    # Under one XLA could not compile a whole step; here it need not.
    with patches.shadowed(trainer, {"_distribute_strategy": None}):
        return getattr(type(trainer), _RESOLVE)(trainer)


def run_in_scope(
    trainer: keras.Model,
    config: TowerConfig,
    methods: Sequence[str] = METHODS,
) -> None:
    """Make a model's methods enter the strategy's scope by themselves."""
    for name in methods:
        # Bypasses Keras's __setattr__, which tracks attributes.
        vars(trainer)[name] = functools.partial(
            _in_scope, config, name, trainer
        )


@compat.filter_traceback
def _in_scope(
    config: TowerConfig,
    name: str,
    model: keras.Model,
    *args: Any,
    **kwargs: Any,
) -> Any:
    method = getattr(type(model), name)
    inside = tf.distribute.has_strategy()
    if inside and in_force() is not config.strategy:
        release_from_home(model)
    if inside and home_of(model) is None:
        # The block of any strategy may train an ordinary model.
        return method(model, *args, **kwargs)
    if home_of(model) is None:
        _at_home.add(model)
    with config.strategy.scope():
        if not inside and name in TRAINING:
            _announce_home(config, name, model)
        return method(model, *args, **kwargs)


def _announce_home(config: TowerConfig, name: str, model: keras.Model) -> None:
    if config.peers.rank == 0 and model not in _announced:
        _announced.add(model)
        announce(
            f"{name} of model {model.name!r} runs on the strategy under which "
            f"it was made or compiled: {config.strategy!r}"
        )


def set_home(trainer: keras.Model, config: TowerConfig) -> None:
    """Make a model train on these towers outside of any block, too."""
    _homes[trainer] = config
    if home_of(trainer) is None:
        run_in_scope(trainer, config, TRAINING)


def release_from_home(trainer: keras.Model) -> None:
    """Make a model ordinary again that was placed outside of any block."""
    owner = owner_of(trainer)
    if owner is not None and trainer in _at_home:
        owner._components.adoption.release_model(trainer)


def unbind(trainer: keras.Model) -> None:
    """Unbind a model from its strategy; its training may have a home."""
    trainer._distribute_strategy = None
    _at_home.discard(trainer)
    drop_functions(trainer)
    vars(trainer).pop("_eval_epoch_iterator", None)
    for name in (*METHODS, *_OF_CALLS, _RESOLVE):
        vars(trainer).pop(name, None)
    if trainer in _homes:
        run_in_scope(trainer, _homes[trainer], TRAINING)


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
    """Log that XLA compiles none of a model's steps of a kind; once.

    It is a warning where the user has asked for XLA: where Keras would not turn
    it on by itself.
    """
    kind = "training" if training else "evaluation"
    line = f"jit_compile is off for {kind} of {trainer.name!r} on towers: {why}"
    if first_time(line):
        asked = not trainer._resolve_auto_jit_compile()
        level = logging.WARNING if asked and not for_now else logging.INFO
        logger.log(level, "%s", line)
