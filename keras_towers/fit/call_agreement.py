"""What all ranks have to agree on: calls, and the variables of models.

They compare the arguments of a call, and the names, shapes and values of
variables; ``rendezvous/rank_checks.py`` exchanges values.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_towers._types import Plain, Variable
from keras_towers.errors import TowerError, shorten
from keras_towers.fit import plain_settings
from keras_towers.fit.components import TRAINING, KerasCall, TowerConfig
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.fit.weights.shards import ShardedVariable, current_value
from keras_towers.rendezvous import activity, failed_calls, rank_checks, watch
from keras_towers.rendezvous.liveness import TaskState, describe_each
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.transport import Transport, messages, next_key
from keras_towers.transport.engine_transport import MAYBE_LOST

logger = logging.getLogger("keras_towers")

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
# How many differences an error shows.
_SHOWN_SETTINGS = 3


def check_call(
    config: TowerConfig,
    keras_call: KerasCall,
    observer: object,
    is_compiled_again: bool = False,
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
        is_compiled_again: whether an earlier call of the method was of another
            compilation of the model.

    Raises:
        TowerError: a setting that changes results differs.
    """
    kind, model = keras_call.kind, keras_call.model
    arguments = keras_call.arguments
    where = f"is at the beginning of {kind}"
    if is_compiled_again:
        # Ranks that have not compiled it are in a step by now.
        compiled = rank_checks.without_numbers(model.name)
        where += f", since model {compiled!r} was compiled again"
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
    settings["run_eagerly"] = str(state_lib.runs_eagerly(model))
    if keras_call.trains:
        steps = getattr(model, "steps_per_execution", 1)
        settings["steps_per_execution"] = str(steps)
        settings |= plain_settings.of_optimizers(model)
        if config.transport.size > 1:
            name = None if observer is None else type(observer).__name__
            settings["callback that measures"] = str(name)
    ranks = _meet(config, settings, kind, where)
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
        shown = "; ".join(
            f"{name} ({rank_checks.describe_ranks(values)})"
            for name, values in itertools.islice(
                differing.items(), _SHOWN_SETTINGS
            )
        )
        raise TowerError(
            f"{kind} of model {model.name!r} has different settings on some "
            f"ranks: {shown}. Build and compile the model, and call {kind}, in "
            "the same way on every rank."
        )


def _meet(
    config: TowerConfig, settings: Plain, kind: str, where: str
) -> list[Plain]:
    """Gather what ranks compare at the beginning of a call.

    Raises:
        TowerError: other ranks make another call, or have ended.
    """
    transport = config.transport
    if transport.size == 1:
        return rank_checks.gather(config.job, settings, where)
    try:
        return watch.wait_for_ranks(
            lambda: rank_checks.gather(transport, settings, where)
        )
    except watch.RanksEnded as error:
        ended = str(error)
    except tf.errors.OpError:
        if failed_calls.calls.begin_again(transport):
            return _meet(config, settings, kind, where)
        if failed_calls.calls.has_failed():
            raise
        ended = transport.ended_ranks() or "another rank has ended"
    raise not_called(config, kind, ended)


def not_called(config: TowerConfig, kind: str, ended: str) -> TowerError:
    """Return the error for a call of some ranks only.

    Args:
        config: the towers.
        kind: the method of Keras.
        ended: describes the ranks that do not call it.
    """
    advice = (
        ""
        if kind in TRAINING
        else (
            ". If only one rank needs it, call it in a callback of fit, or "
            f"after the `with` block of {config.name}"
        )
    )
    return TowerError(
        f"{ended}, and does not call {kind}, but rank {config.job.rank} "
        f"does. Every rank must call {kind}{advice}."
    )


@contextlib.contextmanager
def naming_ended_ranks(config: TowerConfig, kind: str) -> Iterator[None]:
    """Refuse a call of this block whose steps need ranks that have ended.

    For calls that begin without a comparison of the ranks.
    """
    if config.transport.size == 1:
        yield
        return
    refuse = functools.partial(not_called, config, kind)
    try:
        with activity.refusing_by(refuse):
            yield
    except MAYBE_LOST:
        if failed_calls.calls.has_failed():
            raise
        gone = watch.wait_for_gone_ranks()
        if not gone or set(gone.values()) != {TaskState.ENDED}:
            raise
        raise refuse(describe_each(gone)) from None


_SHOWN_VARIABLES = 5
# How the digest of a variable in shards over ranks begins.
_IN_SHARDS = "in shards"
# The entries of variables that are sent at a time.
_SENT_ENTRIES = 2**23


def compare_variables(
    peers: Peers,
    variables: Sequence[Variable],
    values: bool = True,
    build_error: Exception | None = None,
) -> list[Variable]:
    """Check that all ranks have the same variables; return those that differ.

    What is in shards over the ranks does not differ.

    Args:
        peers: the ranks.
        variables: this rank's variables, of Keras or TensorFlow.
        values: whether to compare values, too.
        build_error: why the model could not be built here, so that its first
            step has to build it; None: it is built.

    Returns:
        The variables whose values are not those of rank 0 on all ranks.

    Raises:
        TowerError: their names, shapes or dtypes differ, only some ranks could
            build the model, or rank 0 has a variable in shards that other ranks
            have made again.
    """
    failure = "" if build_error is None else shorten(build_error)
    described = [
        f"{path_of(v)} {list(v.shape)} "
        f"{keras.backend.standardize_dtype(v.dtype)}"
        for v in variables
    ]
    digests = [digest_of(variable) for variable in variables if values]
    gathered = rank_checks.gather(
        peers, (described, digests, failure), "compares the variables"
    )
    ranks = [names for names, _, _ in gathered]
    failures = [failure for _, _, failure in gathered]
    if any(failures) and not all(failures):
        # The steps of these ranks would begin by building it.
        of_ranks = [failure or "built" for failure in failures]
        raise TowerError(
            "some ranks cannot build the model, and others can: "
            f"{rank_checks.describe_ranks(of_ranks, '; ')}. Every rank must "
            "build and compile the same model."
        )
    for rank, other in enumerate(ranks):
        pairs = [
            (first, second)
            for first, second in itertools.zip_longest(
                ranks[0], other, fillvalue="none"
            )
            if rank_checks.without_numbers(first)
            != rank_checks.without_numbers(second)
        ]
        if pairs:
            missing, extra = zip(*pairs, strict=True)
            raise TowerError(
                f"rank {rank} does not have the variables of rank 0. Only on "
                f"rank 0: {_listed(missing)}. Only on rank {rank}: "
                f"{_listed(extra)}. Every rank must build the same model in "
                "the same order, and compile it the same way."
            )
    _, of_rank_0, _ = gathered[0]
    differing = []
    for k, (variable, first) in enumerate(
        zip(variables, of_rank_0, strict=False)
    ):
        others = [of_rank[k] for _, of_rank, _ in gathered]
        if any(digest != first for digest in others):
            if first.startswith(_IN_SHARDS):
                raise TowerError(
                    f"rank 0 still has its shard of {path_of(variable)}, but "
                    "other ranks have made this variable again. Compile and "
                    "build the model on every rank, or on none."
                )
            differing.append(variable)
    return differing


def path_of(variable: Variable) -> str:
    """Return the name of a variable of Keras or TensorFlow."""
    return getattr(variable, "path", variable.name)


def digest_of(variable: Variable) -> str:
    """Return a digest of a value; strings, which are not sent, have none.

    Of rows that only all ranks together have, it is their place.
    """
    held = current_value(variable)
    if isinstance(held, ShardedVariable) and held.is_remote:
        return f"{_IN_SHARDS} {held.place}"
    value = held.read_value()
    if value.dtype == tf.string:
        return ""
    # Not tobytes(), which would copy the value.
    flat = value.numpy().ravel().view(np.uint8)
    return hashlib.sha256(flat).hexdigest()[:16]


def _listed(variables: Sequence[str]) -> str:
    """List the first few variables; missing ones are named "none"."""
    shown = [*dict.fromkeys(variables[:_SHOWN_VARIABLES])]
    if len(variables) > _SHOWN_VARIABLES:
        shown.append(f"{len(variables) - _SHOWN_VARIABLES} more")
    return ", ".join(shown)


def broadcast(
    transport: Transport,
    variables: Sequence[Variable],
    root: int = 0,
    given: Callable[[int], tf.Tensor] | None = None,
) -> None:
    """Give all ranks one rank's values of variables, few at a time.

    Args:
        transport: connects the ranks.
        variables: N variables of TensorFlow; unless values are given, the root
            has the whole of each.
        root: the rank whose values they get.
        given: on the root, returns the value of a variable, by its number;
            None: the variable has it.
    """
    known = [i for i, v in enumerate(variables) if v.dtype != tf.string]
    specs = [tf.TensorSpec(variables[i].shape, tf.int8) for i in known]
    for group in messages.buckets(specs, _SENT_ENTRIES):
        indices = [known[k] for k in group]
        own = [variables[i] for i in indices]
        if transport.rank != root:
            # What is in shards has no whole here.
            values = [
                tf.zeros(v.shape, v.dtype)
                if isinstance(v, ShardedVariable)
                else v.read_value()
                for v in own
            ]
        elif given is None:
            values = [variable.read_value() for variable in own]
        else:
            values = [tf.cast(given(i), variables[i].dtype) for i in indices]
        values = transport.broadcast(values, next_key("broadcast"), root)
        if transport.rank == root and given is None:
            continue
        for variable, value in zip(own, values, strict=True):
            if isinstance(variable, ShardedVariable):
                variable.divide(value)
            else:
                variable.assign(value)
