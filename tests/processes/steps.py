"""Checks of a worker: steps that write state by themselves, on two ranks."""

import keras
import numpy as np

from tests.exactness import models as m
from tests.fit.data import test_rows
from tests.fit.step import (
    test_attributes,
    test_named_logs,
    test_xla,
    written,
)
from tests.kit.compare import assert_exact, close
from tests.kit.ranks import check
from tests.kit.training import X, Y, compiled
from tests.processes.small import Strategy, assert_equal_on_ranks


def trained(model):
    # The last batch of five is uneven; the batches of one leave a rank idle.
    history = model.fit(
        X, Y, batch_size=12, epochs=2, shuffle=False, verbose=0
    ).history
    losses = [
        model.train_on_batch(X[start : start + 1], Y[start : start + 1])
        for start in range(3)
    ]
    return history, losses


def exact(name):
    """A step of ``written`` gives what one process gives, on both ranks."""
    make = written.made(written.CASES[name])
    states = []

    def act(model):
        returned = trained(model)
        states.append(model)
        return returned

    assert_exact(make, act, Strategy(), tolerance=5e-6)
    one, ranks = (getattr(model, "state", list)() for model in states)
    for found, wanted in zip(ranks, one, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=5e-6, atol=5e-6)
    weights = [weight.tobytes() for weight in states[1].get_weights()]
    assert_equal_on_ranks(weights)


@check
def written_state():
    # What a step writes in its own way: state that layers track or do not, a
    # trained weight, sums and counts, means over the batch, plain variables.
    for name in (
        "Averaging",
        "Target",
        "ClippingSometimes",
        "Counting",
        "BatchMeans",
        "Native",
    ):
        exact(name)


@check
def tensors_in_attributes():
    for make in (test_attributes.MAKES["keeping"], test_attributes.quantizing):
        assert_exact(make, test_attributes.trained, Strategy(), tolerance=5e-6)


@check
def logs_by_what_they_are():
    # The states of metrics, on the other hand, are each rank's own.
    make, act = written.made(test_named_logs.Reporting), test_named_logs.trained
    wanted = act(make())
    with Strategy():
        found = act(make())
    keras.tree.map_structure(lambda a, b: close(a, b, 5e-6), found, wanted)


@check
def state_is_averaged_whatever_runs_in_between():
    def act(model):
        def predict(epoch, logs=None):
            model.predict(X[:7], verbose=0)

        note = keras.callbacks.LambdaCallback(on_epoch_begin=predict)
        return model.fit(
            X,
            Y,
            batch_size=12,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[note],
        )

    make = written.made(written.BatchMeans)
    assert_exact(make, act, Strategy(), tolerance=5e-6)


@check
def xla_compiles_what_each_rank_computes():
    make = compiled(
        test_xla.dense,
        test_xla.clipped_and_scaled,
        jit_compile=True,
    )

    def act(model):
        returned = test_xla.used(model)
        # Every rank has counted its own part.
        model.reset_metrics()
        return returned

    assert_exact(make, act, Strategy(), tolerance=5e-6)


@check
def parts_with_other_numbers_of_rows():
    def act(model):
        # The last batches of 6 and 9 rows have three units, for two ranks.
        for few, many in ((8, 16), (6, 9)):
            model.train_on_batch(((X[:few], Y[:few]), X[:many]))

    class Semi(test_rows.SemiSupervised):
        def train_step(self, data):
            return super().train_step(data[0])

    def make():
        model = Semi(m.mlp().layers)
        model.compile(keras.optimizers.SGD(0.005))
        return model

    assert_exact(make, act, Strategy(), tolerance=5e-6)
