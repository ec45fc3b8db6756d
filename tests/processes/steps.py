"""Checks of a worker: steps that write state by themselves, on two ranks."""

import keras
import numpy as np
import tensorflow as tf

from tests.exactness.cases import Case
from tests.fit.capture import test_xla
from tests.fit.step import test_whole_metrics as whole
from tests.fit.step import test_written, written
from tests.kit.compare import outcome
from tests.kit.ranks import check
from tests.kit.training import X, Y, compiled
from tests.processes.exact import assert_one_device
from tests.processes.small import Strategy


def assert_exact(make, act):
    """What is done on the ranks is what is done by one process."""
    return assert_one_device(
        Case(make, act, 5e-6),
        lambda: outcome(make, act, in_graph=False),
        Strategy(),
    )


class Writing(written.Writing):
    """Writes sums, counts, and means over the batch, also natively."""

    def prepare(self):
        super().prepare()
        self.native = tf.Variable(tf.zeros(X.shape[1]), trainable=False)

    def after(self, x, p):
        super().after(x, p)
        self.native.assign(0.7 * self.native + 0.3 * tf.reduce_mean(x, 0))


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
        logs = model.train_on_batch(X[:1], Y[:1])
        return history.history, logs, model.state()

    model = assert_exact(written.made(Writing), act).model
    np.testing.assert_allclose(model.native, model.of_batches, rtol=5e-6)


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
    make = compiled(
        test_xla.dense, test_xla.clipped_and_scaled, jit_compile=True
    )
    assert_exact(make, test_xla.trained)


@check
def metrics_that_are_no_sums():
    def act(model):
        return model.fit(
            *(whole.X, whole.Y, 6),
            sample_weight=whole.WEIGHTS,
            shuffle=False,
            verbose=0,
        )

    assert_exact(whole.no_sums(), act)
