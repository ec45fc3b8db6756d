"""What all ranks have to agree on: calls, and the variables of models.

They compare the arguments, data and settings of a call, and the names, shapes
and values of variables; ``rendezvous/rank_checks.py`` exchanges values.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.fit import step_errors
from keras_towers.fit.contract import TRAINING, KerasCall, TowerConfig
from keras_towers.rendezvous import failed_calls, rank_checks, watch
from keras_towers.rendezvous.liveness import State, describe_each
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.transport import Transport, next_key
from keras_towers.transport.engine_transport import (
    MAYBE_LOST,
    EngineTransport,
)

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
_RATE = "learning_rate"
_LAYERS = "layers"
_SHOWN_CHARACTERS = 80
# These differences only warn: not every setting changes a step. Where a layer's
# does, ranks refuse the step by its constants or its exchanges.
_WARNINGS = {
    _RATE: "the ranks have different learning rates for model %r (%s); all "
    "train with the learning rate of rank 0.",
    _LAYERS: "the layers of model %r have different settings on some ranks "
    "(%s): build the same model on every rank.",
}
# Settings that may differ: default names contain counters of the process.
_PER_RANK = ("name", "seed")


def check_call(
    config: TowerConfig, keras_call: KerasCall, observer: Any
) -> None:
    """Check that all ranks call the same method with the same settings.

    It compares the arguments of the call that determine its steps and, for
    training, the compiled loss and optimizer. Different learning rates only
    cause a warning, since all ranks train with the learning rate of rank 0.

    Args:
        config: the towers.
        keras_call: the call.
        observer: the callback that measures its steps on all ranks, or None.
    """
    kind, model = keras_call.kind, keras_call.model
    arguments = keras_call.arguments
    names: tuple[str, ...] = _EPOCHS
    if config.options.batches == "split":
        names += _FOR_SAME_DATA
    if config.options.batches == "split" or not config.runs_alone(kind):
        names += _STEPS
    settings = {
        name: describe_setting(arguments[name])
        for name in names
        if arguments.get(name) is not None
    }
    settings["validation_data"] = str(
        arguments.get("validation_data") is not None
    )
    if keras_call.trains:
        settings |= _compiled(model) | {_LAYERS: _layers(model)}
        if config.transport.size > 1:
            name = None if observer is None else type(observer).__name__
            settings["callback that measures"] = str(name)
    ranks = _meet(config, settings, kind)
    for name, values in rank_checks.differing_settings(ranks).items():
        values_of_ranks = rank_checks.describe_ranks(values)
        if name in _WARNINGS:
            if config.peers.rank == 0:
                logger.warning(_WARNINGS[name], model.name, values_of_ranks)
            continue
        raise TowerError(
            f"{kind} of model {model.name!r} has different settings on some "
            f"ranks: {name} ({values_of_ranks}). Compile the model and call "
            f"{kind} in the same way on every rank."
        )


def _meet(config: TowerConfig, settings: Any, kind: str) -> list[Any]:
    """Gather what ranks compare at the beginning of a call.

    Raises:
        TowerError: other ranks make another call, or have ended.
    """
    where = f"is at the beginning of {kind}"
    transport = config.transport
    if not isinstance(transport, EngineTransport):
        return rank_checks.gather(config.peers, settings, where)
    try:
        return watch.wait_for_ranks(
            lambda: rank_checks.gather(transport, settings, where)
        )
    except watch.RanksEnded as error:
        ended = str(error)
    except tf.errors.OpError:
        if failed_calls.calls.begin_again(transport):
            return _meet(config, settings, kind)
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
        else ". What only one rank needs goes into a callback of fit, or "
        f"behind the `with` block of {config.name}"
    )
    return TowerError(
        f"{ended}, and does not call {kind}, but rank {config.peers.rank} "
        f"does. Every rank has to call {kind}{advice}."
    )


@contextlib.contextmanager
def naming_ended_ranks(config: TowerConfig, kind: str) -> Iterator[None]:
    """Refuse a call of this block whose steps need ranks that have ended.

    For calls that begin without a comparison of the ranks.
    """
    if not isinstance(config.transport, EngineTransport):
        yield
        return
    refuse = functools.partial(not_called, config, kind)
    try:
        with watch.refusing_by(refuse):
            yield
    except MAYBE_LOST:
        if failed_calls.calls.has_failed():
            raise
        gone = watch.wait_for_gone_ranks()
        if not gone or set(gone.values()) != {State.ENDED}:
            raise
        raise refuse(describe_each(gone)) from None


def _compiled(model: keras.Model) -> dict[str, str]:
    """Describe the compiled settings that affect gradients and updates."""
    optimizer = getattr(model, "optimizer", None)
    # In a LossScaleOptimizer only the inner optimizer has a learning rate.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    try:
        options = dict(inner.get_config()) if inner else {}
    except Exception:  # A custom optimizer need not be serializable.
        options = {}
    # All ranks take rank 0's learning rate only if it is a variable.
    rate = getattr(inner, "_learning_rate", None)
    shared = isinstance(rate, keras.Variable)
    configured = options.pop(_RATE, None)
    if shared:
        rate = configured
    elif isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        # Not every schedule has a configuration that says all.
        rate = [type(rate), vars(rate)]
    compiled_loss = getattr(model, "_compile_loss", None)
    settings = {
        "loss": getattr(model, "loss", None),
        "loss_weights": getattr(compiled_loss, "_user_loss_weights", None),
        "steps_per_execution": getattr(model, "steps_per_execution", 1),
        "optimizer": type(optimizer),
        _RATE if shared else "schedule of learning rates": rate,
    }
    options.pop("name", None)
    settings |= {f"{name} of the optimizer": options[name] for name in options}
    return {name: describe_setting(value) for name, value in settings.items()}


def _layers(model: keras.Model) -> str:
    """Describe the settings of all layers, also of those without variables."""
    layers = [
        layer
        for layer in model._flatten_layers()
        if not isinstance(layer, keras.Model)
    ]
    text = "\n".join(map(_describe, layers))
    return f"{len(layers)}, of digest {_digest(text.encode())}"


def describe_setting(value: Any) -> str:
    """Describe a setting; equal settings have equal texts on all ranks."""
    # Objects without a readable configuration are described by their class.
    text = _describe(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({_digest(text.encode())})"


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _describe(value: Any) -> str:
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return repr(value)
    if isinstance(value, np.generic | np.ndarray):
        if value.size == 1:
            return repr(value.item())
        digest = _digest(np.ascontiguousarray(value).tobytes())
        return f"{value.shape} {value.dtype} {digest}"
    if isinstance(value, Mapping):
        items = {str(k): v for k, v in value.items() if k not in _PER_RANK}
        pairs = (f"{key}={_describe(items[key])}" for key in sorted(items))
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_describe, value))}]"
    if inspect.isroutine(value):
        return _function(value)
    if isinstance(value, type):
        return value.__qualname__
    name = type(value).__qualname__
    try:
        settings = value.get_config()
        # Not all of Keras's losses have these in their configuration.
        settings = {**settings, **getattr(value, "_fn_kwargs", {})}
        return f"{name}({_describe(settings)[1:-1]})"
    except Exception:  # Not every object is serializable.
        return name


def _function(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None or "<" not in name:
        return str(name)
    # All lambdas have the same name: compare their code.
    constants = [c for c in code.co_consts if isinstance(c, str | float | int)]
    parts = code.co_code.hex(), code.co_names, constants
    return f"{name} {_digest(repr(parts).encode())}"


_SHOWN_VARIABLES = 5


def compare_variables(
    peers: Peers,
    variables: Sequence[keras.Variable],
    values: bool = True,
    build_error: Exception | None = None,
) -> bool:
    """Check that all ranks have the same variables; return if values agree.

    Args:
        peers: the ranks.
        variables: this rank's variables.
        values: whether to compare values, too.
        build_error: why the model could not be built here, so that its first
            step has to build it; None: it is built.

    Raises:
        TowerError: their names, shapes or dtypes differ, or only some ranks
            could build the model.
    """
    failure = "" if build_error is None else step_errors.shorten(build_error)
    described = [
        f"{v.path} {list(v.shape)} {keras.backend.standardize_dtype(v.dtype)}"
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
            f"{rank_checks.describe_ranks(of_ranks, '; ')}. Every rank has to "
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
                f"{_listed(extra)}. Every rank has to build the same model in "
                "the same order, and compile it the same way."
            )
    return all(of_rank == digests for _, of_rank, _ in gathered)


def digest_of(variable: keras.Variable) -> str:
    """Return a digest of a value; strings, which are not sent, have none."""
    value = variable._value.read_value()
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
    transport: Transport, variables: Sequence[Any], root: int = 0
) -> None:
    """Broadcast the values of variables from one rank to all ranks."""
    values = [variable.read_value() for variable in variables]
    known = [i for i, v in enumerate(values) if v.dtype != tf.string]
    received = transport.broadcast(
        [values[i] for i in known], next_key("broadcast"), root
    )
    if transport.rank == root:
        return
    for index, value in zip(known, received, strict=True):
        variables[index].assign(value)
