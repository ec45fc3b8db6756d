"""Keras models that train on one device and on towers, and what comes of it."""

import contextlib
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.graph import step_layout
from tests.kit.compare import assert_towers_equal
from tests.partition.cases.table import BATCH


@contextlib.contextmanager
def noting(programs):
    """Give a list the programs of the steps that are traced in a block."""
    lay_out = step_layout.partition_over_mesh

    def noted(*given, **more):
        programs.append(lay_out(*given, **more))
        return programs[-1]

    with unittest.mock.patch.object(step_layout, "partition_over_mesh", noted):
        yield


@contextlib.contextmanager
def on_towers(programs, towers=4, **options):
    """Have Keras train on towers in a block.

    Args:
        programs: gets the programs of the steps that are traced.
        towers: their number.
        **options: of ``TowerStrategy``.
    """
    with noting(programs), kt.TowerStrategy(towers, **options):
        yield


def used(case, scope, act):
    """Use the model of a case.

    Args:
        case: makes the model, and what it is given.
        scope: a block in which it is used.
        act: uses it: a function of the model and features and targets.

    Returns:
        Weights, optimizers' state, and what the function has returned.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with scope:
        model = case.build()
        found = act(model, *case.data())
        assert_towers_equal(model, model.variables)
    optimizers = [model.optimizer, *getattr(model, "others", ())]
    variables = [
        *model.variables,
        *(v for o in optimizers for v in o.variables),
    ]
    returned = tf.nest.flatten(found, expand_composites=True)
    return {
        **{f"{k} {v.name}": np.array(v) for k, v in enumerate(variables)},
        **{f"returned {k}": np.array(leaf) for k, leaf in enumerate(returned)},
    }


def fit(model, x, y, **options):
    """Train for two epochs; return the logs of each batch and epoch."""
    logs_of = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: logs_of.append(dict(logs)),
        on_epoch_end=lambda _, logs: logs_of.append(dict(logs)),
    )
    options = {"callbacks": [note], "shuffle": False, "verbose": 0, **options}
    model.fit(x, y, batch_size=BATCH, epochs=2, **options)
    return logs_of
