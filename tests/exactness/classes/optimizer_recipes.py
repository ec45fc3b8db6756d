"""A network for every optimizer of Keras, in each of its modes."""

import keras
import tensorflow as tf
from keras import layers, optimizers

from tests.exactness.classes.groups import Group
from tests.exactness.classes.recipes import NO_PART, floats, parameters, public

HOLDING_OTHERS = {
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.05), initial_scale=8.0
    ),
    "MultiOptimizer": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.05), {".*bias": optimizers.Adam(0.05)}
        )
    ),
}
_FOUND = {cls.__name__ for cls in public("optimizers")} - {*NO_PART}
# Without the optimizers that wrap others.
OPTIMIZERS = sorted(_FOUND - {*HOLDING_OTHERS})
AVERAGES = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
MODES = {
    "plain": {},
    "averages": AVERAGES,
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.05},
    "decay": {"weight_decay": 0.01},
    "scale": {"loss_scale_factor": 4.0},
}


def modes():
    """Pairs of each optimizer and a mode that it can be made with, by name."""
    return {
        name: {
            f"{name} {mode}": (name, mode)
            for mode, options in MODES.items()
            if mode == "plain"
            or name in OPTIMIZERS
            and options.keys() <= parameters(getattr(optimizers, name)).keys()
        }
        for name in sorted(_FOUND)
    }


class Networks(keras.Model):
    """A network for each optimizer, which one step trains."""

    def __init__(self, modes):
        super().__init__()
        self.nets, self.by = {}, {}
        for key, (name, mode) in modes.items():
            net = keras.Sequential(
                [layers.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)],
                name=key.replace(" ", "_").lower(),
            )
            make = HOLDING_OTHERS.get(name) or getattr(optimizers, name)
            optimizer = make(**MODES[mode])
            # Some that fit builds in a graph lose their first values there.
            optimizer.build(net.trainable_variables)
            self.nets[key], self.by[key] = net, optimizer
        self.built = True

    def train_step(self, data):
        x, y = data
        logs = {}
        for name, net in self.nets.items():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x) - y) ** 2)
                scaled = self.by[name].scale_loss(loss)
            weights = net.trainable_variables
            self.by[name].apply(tape.gradient(scaled, weights), weights)
            logs[name] = loss
        return logs


def group(modes):
    """Make a model of pairs of an optimizer and its mode, by name."""
    model = Networks(modes)
    model.compile(jit_compile=False)
    state = {v.path: v for v in model.variables}
    for name, optimizer in model.by.items():
        # Older versions give all accumulators one path.
        for number, v in enumerate(optimizer.variables):
            state[f"{name} {number} {v.path}"] = v
    data = {"x": floats(6), "y": floats(1), "epochs": 2}
    return Group(model, data, state)
