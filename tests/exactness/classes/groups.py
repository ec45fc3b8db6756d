"""Trains recipes side by side in one model, on one device and on towers."""

import collections
import contextlib
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.exactness.classes.recipes import BATCH, EXAMPLES, head
from tests.kit.compare import differences

# The output of all recipes that have no targets of their own.
JOINED = "joined"


@dataclass
class Group:
    """A compiled model of several parts, and what it is trained with.

    Attributes:
        model: the model, whose optimizers are built.
        data: of ``fit``.
        state: its variables by name.
    """

    model: keras.Model
    data: dict
    state: dict

    def trained(self, scope=None):
        """Fit; return the variables and the history, and reset the model."""
        model = self.model
        everything = [*model.variables, *self.state.values()]
        before = [variable.numpy() for variable in everything]
        # Compiling again would build its losses and metrics again.
        model.train_function = None
        keras.utils.set_random_seed(11)
        with scope or contextlib.nullcontext():
            history = model.fit(
                **self.data, batch_size=BATCH, shuffle=False, verbose=0
            ).history
        found = {name: v.numpy() for name, v in self.state.items()}
        for variable, value in zip(everything, before, strict=True):
            variable.assign(value)
        logs = {f"log {name}": np.asarray(v) for name, v in history.items()}
        return {**found, **logs}


def compared(parts, make, scope_of, tolerance=5e-5):
    """Compare towers with one device; return what differs.

    Args:
        parts: of one model.
        make: makes a group of parts.
        scope_of: makes a block in which towers train a group.
        tolerance: one bias has the rounded gradients of a whole group.
    """
    # The same names, layers and seeds every time.
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    group = make(parts)
    wanted = group.trained()
    return differences(group.trained(scope_of(group)), wanted, tolerance)


def of_recipes(recipes, xla=False):
    """Make a model of all recipes."""
    x, model = _model(recipes)
    y, weights, compiled = _targets(recipes)
    model.compile(keras.optimizers.SGD(0.05), jit_compile=xla, **compiled)
    model.optimizer.build(model.trainable_variables)
    return Group(
        model,
        {"x": x, "y": y, "sample_weight": weights},
        {v.path: v for v in model.variables if "seed" not in v.path},
    )


def _model(recipes):
    """Return the inputs and the model of all recipes."""
    x, inputs, built, outputs, joined = {}, {}, {}, {}, []
    for name, recipe in recipes.items():
        key, kind = id(recipe.x), recipe.x.dtype
        if key not in x:
            strings = kind.kind == "U"
            # Keras takes no array of strings.
            x[key] = tf.constant(recipe.x) if strings else recipe.x
            inputs[key] = layers.Input(
                recipe.x.shape[1:], dtype="string" if strings else kind.name
            )
        entry = inputs[key]
        if recipe.trained:
            dense = key, recipe.trained
            if dense not in built:
                layer = layers.Dense(entry.shape[-1], recipe.trained)
                built[dense] = layer(entry)
            entry = built[dense]
        if recipe.y is None:
            joined.append(layers.Flatten()(recipe.build(entry)))
            continue
        output = key, recipe.build
        if output not in built:
            built[output] = recipe.build(entry)
        outputs[_slot(name, recipe)] = built[output]
    if joined:
        both = joined[0] if len(joined) == 1 else layers.Concatenate()(joined)
        outputs[JOINED] = head(both)
    # Older versions know outputs by the names of their layers.
    named = {name: layers.Identity(name=name)(t) for name, t in outputs.items()}
    return list(x.values()), keras.Model(list(inputs.values()), named)


def _targets(recipes):
    """Return targets, weights and arguments of ``compile``, by output."""
    random = np.random.default_rng(3)
    y, weights, losses = {}, {}, {}
    metrics = {
        kind: collections.defaultdict(list)
        for kind in ("metrics", "weighted_metrics")
    }
    for name, recipe in recipes.items():
        key = _slot(name, recipe)
        if recipe.y is None:
            y[key] = random.normal(size=(EXAMPLES, 1))
        else:
            y[key] = recipe.y
        weights[key] = np.ones(EXAMPLES)
        if recipe.weighted:
            weights[key] += random.random(EXAMPLES) - 0.5
        losses.setdefault(key, keras.losses.MeanSquaredError())
        for kind, make in recipe.compiled.items():
            if kind == "loss":
                losses[key] = make()
            else:
                metrics[kind][key].append(make())
    weighted = any(recipe.weighted for recipe in recipes.values())
    used = {kind: dict(of) for kind, of in metrics.items() if of}
    return y, weights if weighted else None, {"loss": losses, **used}


def _slot(name, recipe):
    """The name of a recipe's output; metrics of the same values share one."""
    if recipe.y is None:
        return JOINED
    if "loss" in recipe.compiled:
        return name.replace(" ", "_").lower()
    return f"watched_{id(recipe.y)}_{recipe.weighted}"
