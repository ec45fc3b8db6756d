"""A model for every optimizer of Keras, in each of its modes."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import layers, optimizers

from tests.exactness.classes.recipes import floats

X, Y = floats(6), floats(1)

Make = Callable[..., Any]

OPTIMIZERS: dict[str, Make] = {
    **{
        name: getattr(optimizers, name)
        for name in (
            *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
            *("Ftrl", "Lamb", "Lion", "Muon", "Nadam", "RMSprop", "SGD"),
        )
    },
    "LossScaleOptimizer": lambda **kwargs: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.05), initial_scale=8.0, **kwargs
    ),
}
if hasattr(optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["ScheduleFreeAdamW"] = optimizers.ScheduleFreeAdamW
if hasattr(optimizers, "MultiOptimizer"):
    OPTIMIZERS["MultiOptimizer"] = lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.05), {".*bias": optimizers.Adam(0.05)}
        )
    )

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "averages": {
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": 2,
    },
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.05},
    "decay": {"weight_decay": 0.01},
    "scale": {"loss_scale_factor": 4.0},
}


def modes_of(name: str) -> list[str]:
    """The modes that an optimizer can be made with."""
    if name == "MultiOptimizer":
        return ["plain"]
    taken = inspect.signature(getattr(optimizers, name).__init__).parameters
    if name == "LossScaleOptimizer":
        return ["plain"]
    return [
        mode
        for mode, options in MODES.items()
        if options.keys() <= taken.keys()
    ]


def model(name: str, mode: str) -> keras.Model:
    """A compiled model whose weights one optimizer trains."""
    keras.utils.set_random_seed(5)
    made = keras.Sequential(
        [layers.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    optimizer = OPTIMIZERS[name](**MODES[mode])
    if name == "ScheduleFreeAdamW":
        # Keras's fit builds it in a graph, where its first values are lost.
        optimizer.build(made.trainable_variables)
    made.compile(optimizer, "mse")
    return made
