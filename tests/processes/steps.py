"""Checks of a worker: steps that write state by themselves, on two ranks."""

import keras
import numpy as np
import tensorflow as tf

from tests.exactness import models as m
from tests.fit.capture import test_xla
from tests.fit.data import test_rows
from tests.fit.step import test_whole_metrics, test_written, written
from tests.kit.compare import assert_same, outcome
from tests.kit.ranks import check
from tests.kit.training import X, Y, compiled
from tests.processes.small import RANK, Strategy, assert_equal_on_ranks


def assert_exact(make, act):
    """What is done on the ranks is what is done by one process."""
    found = outcome(make, act, Strategy())
    state = getattr(found.model, "state", list)()
    assert_equal_on_ranks([w.tobytes() for w in found.model.get_weights()])
    if RANK == 0:
        wanted = outcome(make, act, in_graph=False)
        assert_same(found, wanted, 5e-6)
        for one, other in zip(
            state, getattr(wanted.model, "state", list)(), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=5e-6, atol=5e-6)


class Writing(written.Writing):
    """Writes sums, counts, and means over the batch, also natively."""

    def prepare(self):
        super().prepare()
        self.native = tf.Variable(tf.zeros(X.shape[1]), trainable=False)

    def after(self, x, p):
        super().after(x, p)
        self.native.assign(0.7 * self.native + 0.3 * tf.reduce_mean(x, 0))

    def state(self):
        return [*super().state(), self.native.numpy()]


@check
def state_that_a_step_writes_whatever_runs_in_between():
    def act(model):
        between = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: model.predict(X[:7], verbose=0)
        )
        # The last batch of five is uneven; a batch of one leaves a rank idle.
        history = model.fit(
            *(X, Y, 12, 2, 0), shuffle=False, callbacks=[between]
        )
        return history.history, model.train_on_batch(X[:1], Y[:1])

    assert_exact(written.made(Writing), act)


@check
def logs_by_what_they_are():
    # The states of metrics, on the other hand, are each rank's own.
    def act(model):
        history, seen, _ = test_written.trained(model)
        wrong, _ = vars(model)["hidden"]
        for metric in (model.hits, *model.metrics, wrong):
            metric.reset_state()
        return history, seen

    assert_exact(written.made(test_written.Reporting), act)


@check
def xla_compiles_what_each_rank_computes():
    def act(model):
        returned = test_xla.trained(model)
        # Every rank has counted its own part.
        model.reset_metrics()
        return returned

    make = compiled(
        test_xla.dense, test_xla.clipped_and_scaled, jit_compile=True
    )
    assert_exact(make, act)


@check
def metrics_that_are_no_sums():
    def act(model):
        returned = test_whole_metrics.trained(model)
        # Of the sums among them every rank has its own part.
        model.reset_metrics()
        return returned

    assert_exact(test_whole_metrics.no_sums(), act)


@check
def parts_with_other_numbers_of_rows():
    class Semi(test_rows.SemiSupervised):
        def train_step(self, data):
            return super().train_step(data[0])

    def make():
        model = Semi(m.mlp().layers)
        model.compile(keras.optimizers.SGD(0.005))
        return model

    def act(model):
        # The last batches of 6 and 9 rows have three units, for two ranks.
        for few, many in ((8, 16), (6, 9)):
            model.train_on_batch(((X[:few], Y[:few]), X[:many]))

    assert_exact(make, act)
