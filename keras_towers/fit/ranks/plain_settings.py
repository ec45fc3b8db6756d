"""The settings of a model's layers and optimizers, as plain data.

A backup keeps them (``saved_training.py``): unlike a traced step, they are the
same with any version of Keras and any strategy. Ranks compare those of
optimizers (``call_agreement.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from keras_towers.fit.weights import model_state as state_lib
from keras_towers.foundation.errors import TowerError
from keras_towers.foundation.notices import logger
from keras_towers.jobs.rendezvous import rank_checks

_OPTIMIZER = "optimizer"
_RATE = "learning_rate"
# How many differences an error shows.
_SHOWN_SETTINGS = 3
_INNER = "inner_optimizer"
# Settings that only name objects, or that ranks and backups share.
_IGNORED = ("name", "seed")


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """The settings of a model as plain data, which a backup keeps.

    Attributes:
        keras: the version of Keras.
        model: as ``of_model`` describes it.
        ranks: the number of ranks that train it.
    """

    keras: str
    model: dict[str, str]
    ranks: int

    def differing(self, other: ModelSettings) -> dict[str, list[object]]:
        """Return the settings that differ, each with both values."""
        both = [self.model, other.model]
        if self.keras != other.keras:
            # Each version may have settings that the other one has not.
            known = self.model.keys() & other.model.keys()
            both = [{name: each[name] for name in known} for each in both]
        return without_settings_of_others(rank_checks.differing_settings(both))

    def refuse_other(
        self, now: ModelSettings, path: str, between_epochs: bool
    ) -> None:
        """Refuse a backup of another model.

        Args:
            now: the settings of the model.
            path: where the backup is.
            between_epochs: whether it is not in the middle of an epoch.
        """
        differing = self.differing(now)
        if between_epochs:
            differing.pop("metrics", None)
        if not differing:
            return
        listed = describe_changes(differing)
        if self.ranks == now.ranks or not all(map(is_rate, differing)):
            raise TowerError(
                f"{path} is the backup of another model, or of one that was "
                f"compiled differently: {listed}. Make and compile the model "
                "as it was then, or delete the backup to train from the "
                "beginning. To train its weights with other settings, load "
                "them by kt.load_backup, and give Backup another folder."
            )
        logger.warning(
            "the number of ranks has changed, and so has %s: training goes on "
            "with the values of the backup",
            listed,
        )


def describe_changes(differing: Mapping[str, Sequence[object]]) -> str:
    """List the first settings that differ from those of a backup."""
    return list_first(
        f"{name} ({was} in the backup, {now} now)"
        for name, (was, now) in differing.items()
    )


def list_first(differences: Iterable[str]) -> str:
    """List the first differences, for an error."""
    return "; ".join(itertools.islice(differences, _SHOWN_SETTINGS))


def without_settings_of_others(
    differing: Mapping[str, list[object]],
) -> dict[str, list[object]]:
    """Leave out the settings of an object of another class.

    They have other names, and say nothing that the class does not.
    """
    others = [
        f" of {'the ' if name == _OPTIMIZER else ''}{name}"
        for name in differing
        if name.startswith((_OPTIMIZER, "layer "))
    ]
    return {
        name: values
        for name, values in differing.items()
        if not any(
            name.endswith(other) or f"{other} (" in name for other in others
        )
    }


def of_model(model: keras.Model) -> dict[str, str]:
    """Describe loss, metrics, layers and optimizers of a model.

    Not its connections, nor code, such as that of a lambda.
    """
    metrics = getattr(model, "_compile_metrics", None)
    losses = getattr(model, "_compile_loss", None)
    settings = {
        "loss": in_words(getattr(model, "loss", None)),
        "loss weights": in_words(getattr(losses, "_user_loss_weights", None)),
        "metrics": in_words(getattr(metrics, "_user_metrics", None)),
        "weighted metrics": in_words(
            getattr(metrics, "_user_weighted_metrics", None)
        ),
    }
    for number, layer in enumerate(_layers_of(model)):
        name = f"layer {number}"
        settings[name] = type(layer).__qualname__
        # That of a model repeats the layers, by their names.
        options = {}
        if not isinstance(layer, keras.Model):
            options = _options_of(layer) | _objects_of(layer)
        name += f" ({settings[name]})"
        settings |= {f"{k} of {name}": in_words(v) for k, v in options.items()}
    return settings | of_optimizers(model)


def of_layers(model: keras.Model) -> dict[str, str]:
    """Describe which layers are frozen, and the dtype policies of all."""
    layers = _layers_of(model)
    policies = {layer.dtype_policy.name for layer in layers}
    return {"dtype policies": in_words(sorted(policies))} | {
        f"trainable of layer {number} ({type(layer).__qualname__})": "False"
        for number, layer in enumerate(layers)
        if not layer.trainable
    }


def _layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    # Building gives an InputLayer to a Sequential that has none.
    return [
        layer
        for layer in model._flatten_layers()
        if not isinstance(layer, keras.layers.InputLayer)
    ]


def of_optimizers(model: keras.Model) -> dict[str, str]:
    """Describe all optimizers of a model."""
    optimizer = getattr(model, "optimizer", None)
    # In a LossScaleOptimizer only the inner optimizer has a learning rate.
    main = getattr(optimizer, _INNER, optimizer)
    settings = {_OPTIMIZER: type(optimizer).__qualname__}
    others = [o for o in state_lib.collect(model).optimizers if o is not main]
    for number, other in enumerate([main, *others], 1):
        name = "the optimizer" if number == 1 else f"optimizer {number}"
        if number > 1:
            settings[name] = type(other).__qualname__
        options = _options_of(other)
        rate = getattr(other, "_learning_rate", None)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            # Not every schedule has a configuration that says all.
            options.pop(_RATE, None)
            settings[f"schedule of {name}"] = type(rate).__qualname__
            options |= {
                f"{k} of the schedule": v for k, v in vars(rate).items()
            }
        settings |= {f"{k} of {name}": in_words(v) for k, v in options.items()}
    return settings


def is_rate(name: str) -> bool:
    """Whether a setting is a learning rate that is a variable."""
    return name.startswith(_RATE)


def _config_of(configured: Any) -> dict[str, Any]:
    with contextlib.suppress(Exception):  # Not every object has one.
        return dict(configured.get_config())
    return {}


def _options_of(configured: Any) -> dict[str, object]:
    # Not all of Keras's losses have these in their configuration.
    config = _config_of(configured) | getattr(configured, "_fn_kwargs", {})
    return {
        name: value
        for name, value in config.items()
        if name not in _IGNORED and _is_plain(value)
    }


def _objects_of(layer: keras.layers.Layer) -> dict[str, object]:
    """Describe a layer's regularizers, constraints and dtype policy."""
    objects: dict[str, object] = {}
    for name, value in _config_of(layer).items():
        # Values that weights begin with are not those that they have.
        if not isinstance(value, Mapping) or name.endswith("initializer"):
            continue
        own = value.get("config")
        if isinstance(own, Mapping) and all(map(_is_plain, own.values())):
            # The name of a dtype policy says which one it is.
            objects[name] = {value.get("class_name"): own}
    return objects


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)


def in_words(value: Any) -> str:
    """Describe a value in words, the same on all ranks for equal values."""
    if isinstance(value, Mapping):
        pairs = ((str(key), in_words(each)) for key, each in value.items())
        return (
            f"{{{', '.join(f'{key}: {text}' for key, text in sorted(pairs))}}}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_words, value))}]"
    # NumPy shows numbers with their class.
    value = value.tolist() if hasattr(value, "tolist") else value
    if _is_plain(value):
        return repr(value)
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return f"{type(value).__qualname__}{in_words(_options_of(value))}"
