"""What all ranks have to agree on: calls, and the variables of models.

They compare the arguments, data and settings of a call, and the names, shapes
and values of variables; ``rendezvous/rank_checks.py`` exchanges values.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers._notices import announce, first_time
from keras_towers.errors import TowerError, shorten
from keras_towers.fit.contract import TRAINING, KerasCall, TowerConfig
from keras_towers.rendezvous import activity, failed_calls, rank_checks, watch
from keras_towers.rendezvous.liveness import TaskState, describe_each
from keras_towers.rendezvous.rank_checks import Peers
from keras_towers.transport import Transport, next_key
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
_RATE = "learning_rate"
_LAYERS = "layers"
# Keras's key for the class of a serialized object, and its class of functions
# without a name.
_CLASS = "class_name"
_LAMBDA = "__lambda__"
# How many differences an error shows.
_SHOWN_SETTINGS = 3
_SHOWN_CHARACTERS = 80
# All ranks draw with rank 0's seed generators.
_SEED = "seed"
# Their names count what a process has made, and change no result.
_NAMED = (
    keras.Operation,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
)


def check_call(
    config: TowerConfig,
    keras_call: KerasCall,
    observer: Any,
    is_compiled_again: bool = False,
) -> None:
    """Check that all ranks call the same method with the same settings.

    It compares the arguments of the call that determine its steps, the settings
    of layers and, for training, the compiled loss and optimizer. Different
    learning rates only cause a warning, since all ranks train with the learning
    rate of rank 0.

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
    words = _Words()
    settings = {
        name: words.cut(arguments[name])
        for name in names
        if arguments.get(name) is not None
    }
    settings["validation_data"] = str(
        arguments.get("validation_data") is not None
    )
    if keras_call.trains:
        settings |= _compiled(model, words)
        if config.transport.size > 1:
            name = None if observer is None else type(observer).__name__
            settings["callback that measures"] = str(name)
    # All ranks need to see them only if they differ.
    layers = _layers(model, words)
    of_layers = [of_layer for _, of_layer in layers]
    settings[_LAYERS] = _digest(repr(of_layers).encode())
    ranks = _meet(config, settings, kind, where)
    differing = rank_checks.differing_settings(ranks)
    if differing.pop(_LAYERS, None):
        differing |= _differing_layer(_meet(config, layers, kind, where))
    rates = differing.pop(_RATE, None)
    if rates and config.job.rank == 0:
        logger.warning(
            "the ranks have different learning rates for model %r (%s); all "
            "train with the learning rate of rank 0.",
            model.name,
            rank_checks.describe_ranks(rates),
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
    unread = ", ".join(sorted(words.unread))
    if unread and config.job.rank == 0 and first_time(model, unread):
        announce(
            f"the ranks of model {model.name!r} compare these only by their "
            f"class, since they have no get_config() to read: {unread}. Make "
            "them with the same settings on every rank."
        )


def _meet(
    config: TowerConfig, settings: Any, kind: str, where: str
) -> list[Any]:
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
        else ". What only one rank needs goes into a callback of fit, or "
        f"behind the `with` block of {config.name}"
    )
    return TowerError(
        f"{ended}, and does not call {kind}, but rank {config.job.rank} "
        f"does. Every rank has to call {kind}{advice}."
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


def _compiled(model: keras.Model, words: _Words) -> dict[str, str]:
    """Describe the compiled settings that affect gradients and updates."""
    optimizer = getattr(model, "optimizer", None)
    # In a LossScaleOptimizer only the inner optimizer has a learning rate.
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    options = words.config_of(inner) or {}
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
    settings |= {f"{name} of the optimizer": options[name] for name in options}
    return {name: words.cut(value) for name, value in settings.items()}


def _layers(
    model: keras.Model, words: _Words
) -> list[tuple[str, dict[str, str]]]:
    """Describe all layers, also those without variables: name and settings."""
    described = []
    for layer in model._flatten_layers():
        if not isinstance(layer, keras.Model):
            settings = {"class": type(layer).__qualname__}
            for name, value in (words.config_of(layer) or {}).items():
                live = None
                with contextlib.suppress(Exception):
                    live = getattr(layer, name, None)
                # The code of a function without a name is serialized with its
                # path, and may differ where the function does not.
                is_function = inspect.isroutine(live)
                settings[name] = words.cut(live if is_function else value)
            described.append((layer.name, settings))
    return described


def _differing_layer(
    ranks: Sequence[Sequence[tuple[str, dict[str, str]]]],
) -> dict[str, list[str]]:
    """Return the settings that differ of the first layer that has such.

    Args:
        ranks: what ``_layers`` says on each rank.
    """
    for k in range(max(map(len, ranks))):
        own = [layers[k] for layers in ranks if k < len(layers)]
        settings = [layers[k][1] if k < len(layers) else {} for layers in ranks]
        differing = rank_checks.differing_settings(settings)
        # Layers of different classes have few settings in common.
        names = ["class"] if "class" in differing else differing
        if differing:
            name, _ = own[0]
            return {
                f"{setting} of layer {name!r}": differing[setting]
                for setting in names
            }
    return {}


class _Words:
    """Settings in words: equal settings have equal words on all ranks.

    Attributes:
        unread: the classes of which only the name is in these words.
    """

    def __init__(self):
        self.unread: set[str] = set()

    def cut(self, value: Any) -> str:
        """Describe a setting in a few words."""
        text = self.of(value)
        if len(text) <= _SHOWN_CHARACTERS:
            return text
        return f"{text[:_SHOWN_CHARACTERS]}... ({_digest(text.encode())})"

    def config_of(self, value: Any) -> dict[str, Any] | None:
        """Return what of an object's configuration changes results, or None."""
        if value is None:
            return None
        try:
            config = dict(value.get_config())
        except Exception:  # Not every object is serializable.
            self.unread.add(type(value).__qualname__)
            return None
        # Not all of Keras's losses have these in their configuration.
        config |= getattr(value, "_fn_kwargs", {})
        return _that_counts(type(value), config)

    def of(self, value: Any) -> str:
        """Describe a setting."""
        if value is None or isinstance(
            value, str | bytes | bool | int | float | complex | enum.Enum
        ):
            return repr(value)
        if isinstance(value, tf.DType | np.dtype | tf.TensorShape):
            return str(value)
        if isinstance(value, tf.Tensor | tf.Variable | keras.Variable):
            value = np.asarray(value)
        if isinstance(value, np.generic | np.ndarray):
            if value.size == 1:
                return repr(value.item())
            digest = _digest(np.ascontiguousarray(value).tobytes())
            return f"{value.shape} {value.dtype} {digest}"
        if isinstance(value, Mapping):
            if {_CLASS, "config"} <= value.keys():
                return self._serialized(value)
            return f"{{{self._pairs(value)}}}"
        if isinstance(value, Sequence | set | frozenset):
            texts = map(self.of, value)
            is_set = isinstance(value, set | frozenset)
            return f"[{', '.join(sorted(texts) if is_set else texts)}]"
        if isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            return f"partial({', '.join(map(self.of, parts))})"
        if inspect.isroutine(value):
            return _function(value)
        if isinstance(value, type):
            return value.__qualname__
        name = type(value).__qualname__
        config = self.config_of(value)
        return name if config is None else f"{name}({self._pairs(config)})"

    def _pairs(self, values: Mapping[Any, Any]) -> str:
        items = {str(key): value for key, value in values.items()}
        return ", ".join(
            f"{key}={self.of(items[key])}" for key in sorted(items)
        )

    def _serialized(self, value: Mapping[str, Any]) -> str:
        """Describe an object as Keras serializes it in another's config."""
        name, config = str(value[_CLASS]), value["config"]
        if name == _LAMBDA:
            self.unread.add("lambda")
            return name
        if not isinstance(config, Mapping):
            return f"{name}({self.of(config)})"
        cls = _class_of(value)
        if cls is not None and issubclass(cls, keras.Layer):
            return name  # It is described by itself.
        return f"{name}({self._pairs(_that_counts(cls, config))})"


def _class_of(serialized: Mapping[str, Any]) -> type | None:
    """Return the class of a serialized object, if it can be found."""
    name = serialized[_CLASS]
    registered = str(serialized.get("registered_name") or name)
    cls = keras.saving.get_registered_object(registered) or getattr(
        sys.modules.get(str(serialized.get("module"))), str(name), None
    )
    return cls if isinstance(cls, type) else None


def _that_counts(cls: type | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a configuration changes the results of ranks.

    Args:
        cls: the class that it is of; None: it is not known.
        config: the configuration.
    """
    dropped = {_SEED}
    if cls is None or issubclass(cls, _NAMED):
        dropped.add("name")
    return {
        name: value
        for name, value in config.items()
        if name not in dropped and not _initializes(value)
    }


def _initializes(value: Any) -> bool:
    """Whether a setting only gives first values, which are those of rank 0."""
    if not isinstance(value, Mapping) or _CLASS not in value:
        return isinstance(value, keras.initializers.Initializer)
    cls = _class_of(value)
    return cls is not None and issubclass(cls, keras.initializers.Initializer)


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


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
    failure = "" if build_error is None else shorten(build_error)
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
