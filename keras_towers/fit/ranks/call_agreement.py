"""Agreement of ranks on the arguments of a method that all of them call.

``tower_runner.py`` calls it before a call begins. ``weights/agreement.py``
compares variables, and ``jobs/rendezvous/rank_checks.py`` exchanges the
compared values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

from keras_towers.fit.components import TRAINING, KerasCall, TowerConfig
from keras_towers.fit.ranks import plain_settings
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.joint_access import Intent, JointAccess
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import failed_calls, rank_checks
from keras_towers.transport.engine_transport import refusing_ended

_Result = TypeVar("_Result")

# Arguments that determine which epochs a rank runs.
_EPOCHS = ("epochs", "initial_epoch", "validation_freq")
# These set the number of steps, which ranks take together.
_STEPS = ("steps_per_epoch", "steps", "validation_steps")
# These may differ if each rank reads its own data.
_FOR_SAME_DATA = (
    "batch_size",
    "shuffle",
    "class_weight",
    "validation_split",
    "validation_batch_size",
)


def check_call(
    config: TowerConfig, keras_call: KerasCall, observer: object, where: str
) -> None:
    """Check that all ranks call the same method with the same arguments.

    It compares the arguments that determine its steps and, for training, the
    settings of optimizers; of the rest of a model, ranks compare the steps that
    they trace. Different learning rates only cause a warning, since all ranks
    train with the learning rate of rank 0.

    Args:
        config: the towers.
        keras_call: the call.
        observer: the callback that measures its steps on all ranks, or None.
        where: what this rank does, as ``beginning_of`` says it.

    Raises:
        TowerError: a setting that changes results differs.
    """
    kind, model = keras_call.kind, keras_call.model
    arguments = keras_call.arguments
    names: tuple[str, ...] = _EPOCHS
    if config.options.batches == "split":
        names += _FOR_SAME_DATA
    if config.places(kind).ranks.batch.size > 1:
        names += _STEPS
    settings = {
        name: plain_settings.in_words(arguments[name])
        for name in names
        if arguments.get(name) is not None
    }
    settings["validation_data"] = str(
        arguments.get("validation_data") is not None
    )
    eager = state_lib.runs_eagerly(model)
    settings["run_eagerly"] = str(eager)
    if keras_call.trains:
        steps = getattr(model, "steps_per_execution", 1)
        settings["steps_per_execution"] = str(steps)
        # Each rank may have another default.
        compiles, default = model.jit_compile, model._resolve_auto_jit_compile()
        if not eager and compiles != default:
            settings["jit_compile"] = str(compiles)
        settings |= plain_settings.of_layers(model)
        settings |= plain_settings.of_optimizers(model)
        if config.transport.size > 1:
            name = None if observer is None else type(observer).__name__
            settings["callback that measures"] = str(name)
    ranks = _begin(
        config, kind, lambda: rank_checks.gather(config.job, settings, where)
    )
    differing = plain_settings.without_settings_of_others(
        rank_checks.differing_settings(ranks)
    )
    rates = [name for name in differing if plain_settings.is_rate(name)]
    for name in rates:
        values = differing.pop(name)
        if config.job.rank == 0:
            logger.warning(
                "the ranks have different learning rates for model %r (%s: "
                "%s); all train with the learning rate of rank 0.",
                model.name,
                name,
                rank_checks.describe_ranks(values),
            )
    if differing:
        shown = plain_settings.list_first(
            f"{name} ({rank_checks.describe_ranks(values)})"
            for name, values in differing.items()
        )
        raise TowerError(
            f"{kind} of model {model.name!r} has different settings on some "
            f"ranks: {shown}. Build and compile the model, and call {kind}, in "
            "the same way on every rank."
        )


def beginning_of(keras_call: KerasCall, is_compiled_again: bool) -> str:
    """Return the words that a rank begins a call, to follow "rank 0".

    Args:
        keras_call: the call.
        is_compiled_again: whether an earlier call of the method was of another
            compilation of the model.
    """
    where = f"is at the beginning of {keras_call.kind}"
    if is_compiled_again:
        # Ranks that have not compiled it are in a step by now.
        compiled = rank_checks.without_numbers(keras_call.model.name)
        where += f", since model {compiled!r} was compiled again"
    return where


def serve(
    config: TowerConfig, access: JointAccess, kind: str, where: str
) -> None:
    """Before a call, serve ranks that read, write or save something first.

    Args:
        config: the towers.
        access: to variables of which each rank has rows.
        kind: the method of Keras.
        where: what this rank does, as ``beginning_of`` says it.
    """

    def exchange(mine: Intent) -> list[Intent]:
        return _begin(config, kind, lambda: access.compare(mine, where))

    access.serve(where, exchange)


def _begin(
    config: TowerConfig, kind: str, meet: Callable[[], _Result]
) -> _Result:
    """Meet the other ranks at the beginning of a call.

    Raises:
        TowerError: other ranks make another call, or have ended.
    """
    with naming_ended_ranks(config, kind):
        try:
            return meet()
        except tf.errors.OpError:
            if not failed_calls.calls.begin_again(config.transport):
                raise
    return _begin(config, kind, meet)


def naming_ended_ranks(
    config: TowerConfig, kind: str
) -> contextlib.AbstractContextManager[None]:
    """In this block, refuse a call that needs ranks that have ended.

    Args:
        config: the towers.
        kind: the method of Keras.
    """
    advice = ""
    if kind not in TRAINING:
        advice = (
            ". If only one rank needs it, call it in a callback of fit, or "
            f"after the `with` block of {config.name}"
        )

    def refuse(ended: str) -> TowerError:
        return TowerError(
            f"{ended}, and does not call {kind}, but rank {config.job.rank} "
            f"does. Every rank must call {kind}{advice}."
        )

    return refusing_ended(config.transport, refuse)
