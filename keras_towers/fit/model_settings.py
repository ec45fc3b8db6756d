"""What a model's layers are set to, and what it was compiled with, in words.

Equal settings have equal words in every process: ranks compare them
(``rank_agreement.py``), and a backup notes them (``backup.py``). What only
names or counts objects, seeds, and what gives weights their first values are
left out. Not compared: the code of methods, and attributes that
``get_config()`` does not return.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.fit.weights import model_state as state_lib
from keras_towers.rendezvous import rank_checks

METRICS: tuple[str, ...] = ("metrics", "weighted_metrics")
"""Names of settings that change no weights."""

_RATE = "learning_rate"
# Keras's key for the class of a serialized object, and its class of functions
# without a name.
_CLASS = "class_name"
_LAMBDA = "__lambda__"
# All ranks draw with rank 0's seed generators.
_SEED = "seed"
# Their names count what a process has made, and change no result.
_NAMED = (
    keras.Operation,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
)
_PLAIN = (
    *(str, bytes, bool, int, float, complex, enum.Enum),
    *(slice, types.EllipsisType),
)
_INNER = "inner_optimizer"
_SHOWN_CHARACTERS = 80


def describe(model: keras.Model) -> dict[str, Any]:
    """Describe all settings of a model, as plain values, for later."""
    words = Words()
    return {
        "keras": keras.__version__,
        "compiled": compiled(model, words),
        "layers": layers(model, words),
    }


def differing(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the settings that differ, with both values.

    Args:
        one: what ``describe`` says of a model.
        other: what it says of another one, maybe with another Keras: settings
            that only one of two versions has do not count.
    """
    if one["keras"] != other["keras"]:
        one, other = _known_to(other, one), _known_to(one, other)
    differing = rank_checks.differing_settings(
        [one["compiled"], other["compiled"]]
    )
    return differing | differing_layer([one["layers"], other["layers"]])


def _known_to(
    reader: Mapping[str, Any], described: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a description less the settings that another one has not."""

    def known(
        settings: Mapping[str, str], its: Mapping[str, str]
    ) -> dict[str, str]:
        return {name: settings[name] for name in settings.keys() & its.keys()}

    own = [its for _, its in reader["layers"]]
    layers = [
        (name, known(settings, own[k]) if k < len(own) else settings)
        for k, (name, settings) in enumerate(described["layers"])
    ]
    compiled = known(described["compiled"], reader["compiled"])
    return {"compiled": compiled, "layers": layers}


def is_rate(name: str) -> bool:
    """Whether a setting is a learning rate that is a variable."""
    return name.startswith(_RATE)


def compiled(model: keras.Model, words: Words) -> dict[str, str]:
    """Describe what a model was compiled with, and other optimizers of it."""
    loss = getattr(model, "_compile_loss", None)
    metrics = getattr(model, "_compile_metrics", None)
    optimizer = getattr(model, "optimizer", None)
    settings = {
        "loss": getattr(model, "loss", None),
        "loss_weights": getattr(loss, "_user_loss_weights", None),
        "steps_per_execution": getattr(model, "steps_per_execution", 1),
        "metrics": getattr(metrics, "_user_metrics", None),
        "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
        "optimizer": type(optimizer),
    }
    # In a LossScaleOptimizer only the inner optimizer has a learning rate.
    main = getattr(optimizer, _INNER, optimizer)
    settings |= _of_optimizer(main, "the optimizer", words)
    others = (o for o in state_lib.collect(model).optimizers if o is not main)
    for number, other in enumerate(others, 2):
        settings[f"optimizer {number}"] = type(other)
        settings |= _of_optimizer(other, f"optimizer {number}", words)
    return {name: words.cut(value) for name, value in settings.items()}


def _of_optimizer(optimizer: Any, name: str, words: Words) -> dict[str, Any]:
    options = words.config_of(optimizer) or {}
    options.pop(_INNER, None)
    # Ranks and backups share a learning rate only if it is a variable.
    rate = getattr(optimizer, "_learning_rate", None)
    configured = options.pop(_RATE, None)
    of_rate = f"schedule of learning rates of {name}"
    if isinstance(rate, keras.Variable):
        of_rate, rate = f"{_RATE} of {name}", configured
    elif isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        # Not every schedule has a configuration that says all.
        rate = [type(rate), vars(rate)]
    settings = {f"{key} of {name}": value for key, value in options.items()}
    return settings if rate is None else {of_rate: rate, **settings}


def layers(
    model: keras.Model, words: Words
) -> list[tuple[str, dict[str, str]]]:
    """Describe all layers, also those without variables: name and settings."""
    described = []
    for layer in model._flatten_layers():
        # Building gives one to a Sequential that has none.
        if isinstance(layer, keras.layers.InputLayer):
            continue
        settings = {"class": type(layer).__qualname__}
        if isinstance(layer, compat.Functional):
            settings["connections"] = words.cut(_connections(layer))
        if not isinstance(layer, keras.Model):
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


def _connections(model: Any) -> str:
    """Describe which operations a functional model calls, with what."""
    nodes = [
        (operation, node)
        for operation in model.operations
        for index, node in enumerate(operation._inbound_nodes)
        if compat.make_node_key(operation, index) in model._nodes
    ]
    numbers = {
        id(output): f"{number}.{index}"
        for number, (_, node) in enumerate(nodes)
        for index, output in enumerate(node.outputs)
    }

    def named(value: Any) -> Any:
        return numbers.get(id(value), value)

    calls = []
    for operation, node in nodes:
        words = Words()  # An operation that has no configuration has a class.
        is_layer = isinstance(operation, keras.Layer)
        config = {} if is_layer else words.config_of(operation)
        given = tf.nest.map_structure(
            named, (node.arguments.args, node.arguments.kwargs)
        )
        calls.append((type(operation), config, *given))
    outputs = [named(output) for output in model.outputs]
    return Words().of([*calls, outputs])


def differing_layer(
    ranks: Sequence[Sequence[tuple[str, dict[str, str]]]],
) -> dict[str, list[str]]:
    """Return the settings that differ of the first layer that has such.

    Args:
        ranks: what ``layers`` says on each rank, or of each of two models.
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


class Words:
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
        return f"{text[:_SHOWN_CHARACTERS]}... ({digest(text.encode())})"

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
        if value is None or isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, tf.DType | np.dtype | tf.TensorShape):
            return str(value)
        if isinstance(value, tf.Tensor | tf.Variable | keras.Variable):
            value = np.asarray(value)
        if isinstance(value, np.generic | np.ndarray):
            if value.size == 1:
                return repr(value.item())
            found = digest(np.ascontiguousarray(value).tobytes())
            return f"{value.shape} {value.dtype} {found}"
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


def digest(data: Any) -> str:
    """Return eight hexadecimal digits that differ where the bytes do."""
    return hashlib.sha256(data).hexdigest()[:8]


def _function(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None or "<" not in name:
        return str(name)
    # All lambdas have the same name: compare their code.
    constants = [c for c in code.co_consts if isinstance(c, str | float | int)]
    parts = code.co_code.hex(), code.co_names, constants
    return f"{name} {digest(repr(parts).encode())}"
