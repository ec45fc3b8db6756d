"""A job of one worker, whose parameter server is this process."""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.data.epoch_iterator import RELEASES
from keras_towers.foundation.errors import TowerError
from keras_towers.inspection.conformance import case_models as m
from keras_towers.replicas.replica_calls import TrainFunction
from keras_towers.strategies import parameter_server_strategies
from tests.fit.step.acts import ReadsItsUpdate
from tests.kit.compare import assert_same_model
from tests.kit.leaving import Boom
from tests.kit.sampling import sample_of
from tests.kit.training import X, Y, fit, linear
from tests.strategies import async_cases

pytestmark = pytest.mark.alternate


@pytest.fixture
def strategy(job, monkeypatch):
    """Creates a strategy for a job of one worker."""

    def make(name="SyncReplicasStrategy", **kwargs):
        connection = job(1).connect(0)
        monkeypatch.setattr(
            parameter_server_strategies, "take_role", lambda *_: connection
        )
        return getattr(kt, name)(cluster=connection.cluster, **kwargs)

    return make


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("SyncReplicasStrategy", {}, "averages 1 gradients"),
        ("DistributedParameterServerStrategy", {"sync": True}, "averaged"),
        ("DistributedParameterServerStrategy", {"sync": False}, "waits for no"),
        ("DistributedReplicatedStrategy", {"scale_gradient": False}, "summed"),
    ],
)
def test_describe(strategy, name, options, said):
    mine = strategy(name, **options)
    assert mine.batches == "split"
    assert said in mine.describe()


def test_the_workers_of_the_job_are_the_replicas(strategy):
    with pytest.raises(TowerError, match="total_num_replicas=2"):
        strategy(total_num_replicas=2)


# The first one waits for an average, the other one for nothing.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SyncReplicasStrategy", {}),
        ("DistributedParameterServerStrategy", {"sync": False}),
    ],
)
def test_a_model_that_is_dropped_is_freed(strategy, name, options, monkeypatch):
    """Else the servers would hold the weights of every model for good."""
    held = []

    class Waits(threading.Thread):
        """As a thread that frees data whose reads are still pending."""

        def start(self):
            held.append(self) if self.name == RELEASES else super().start()

    monkeypatch.setattr(threading, "Thread", Waits)
    model = linear()
    with strategy(name, **options):
        fit(model)
        left = weakref.ref(model)
        del model
        gc.collect()
        assert left() is None
        assert held


def normalised():
    model = m.mlp(keras.layers.BatchNormalization(momentum=0.5))
    model.compile("sgd", m.cross_entropy())
    return model


@pytest.mark.parametrize(
    "name", sample_of(["DistributedReplicatedStrategy", "SyncReplicasStrategy"])
)
def test_after_an_epoch_the_servers_hold_the_model(strategy, name):
    """Including variables that no optimizer trains, as moving statistics."""
    model, mine = normalised(), strategy(name)

    def compare(epoch, logs):
        held = mine._runner.last.variables
        for local in model.weights:
            np.testing.assert_array_equal(local, held.copy_of(local))
        # Training has changed the moving statistics.
        assert not np.allclose(model.weights[-1], 1)

    watch = keras.callbacks.LambdaCallback(on_epoch_end=compare)
    with mine:
        fit(model, callbacks=[watch])


@pytest.mark.core
def test_logs_of_dropped_gradients(strategy, tmp_path):
    """Epochs have them if gradients can be dropped, as in one process."""
    board = keras.callbacks.TensorBoard(tmp_path)
    with strategy(tokens="shared"):
        logs = fit(linear(), epochs=2, callbacks=[board])
    assert logs["dropped_gradients"] == [0, 0]
    assert ("dropped_gradients/replica_0", 1) in async_cases.written(tmp_path)


class UpdatesInACondition(keras.Sequential):
    """Calls its optimizer in a condition, maybe after another optimizer."""

    first = None

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        kernel, bias = self.trainable_variables
        for_kernel, for_bias = tape.gradient(loss, [kernel, bias])
        if self.first is not None:
            self.first.apply([for_kernel], [kernel])

        def update():
            self.optimizer.apply([for_bias], [bias])
            return loss

        return {"loss": tf.cond(loss > 0.1, update, lambda: loss)}


@pytest.mark.parametrize(
    "name", ["DistributedReplicatedStrategy", "SyncReplicasStrategy"]
)
@pytest.mark.parametrize(
    "first, said",
    [(None, "updates nothing"), (keras.optimizers.SGD, "writes into .*/bias")],
)
def test_an_update_in_a_condition_is_refused(strategy, name, first, said):
    layers = [keras.layers.Input((4,)), keras.layers.Dense(1)]
    model = UpdatesInACondition(layers)
    model.compile("sgd")
    kernel, bias = model.trainable_variables
    model.optimizer.build([bias])
    if first is not None:
        model.first = first()
        model.first.build([kernel])
    with strategy(name), pytest.raises(TowerError, match=said):
        model.fit(X[:, :4], X[:, :1], verbose=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DistributedReplicatedStrategy", {"towers": 2}),
        ("DistributedParameterServerStrategy", {}),
        ("SyncReplicasStrategy", {}),
    ],
)
def test_a_weight_that_is_read_after_its_update_is_refused(
    strategy, name, options
):
    layers = [keras.layers.Input((4,)), keras.layers.Dense(1)]
    model = ReadsItsUpdate(layers, name="late")
    model.compile("sgd", "mse")
    said = "calls an optimizer and then reads late/dense.*/kernel"
    with strategy(name, **options), pytest.raises(TowerError, match=said):
        model.fit(X[:, :4], X[:, :1], verbose=0)


def test_swapped_weights_are_refused_where_other_workers_may_update(strategy):
    callbacks = [keras.callbacks.SwapEMAWeights()]

    def averaging():
        return linear(optimizer=lambda: keras.optimizers.SGD(0.1, use_ema=True))

    with strategy():
        fit(averaging(), callbacks=callbacks)
    said = pytest.raises(TowerError, match="these updates would be lost")
    with strategy(tokens="shared"), said:
        fit(averaging(), callbacks=callbacks)


def test_a_constraint_that_is_set_between_two_fits_is_refused(strategy):
    model = linear()
    asynchronous = strategy("DistributedParameterServerStrategy", sync=False)
    assert not asynchronous.sync
    with asynchronous:
        fit(model)
        model.trainable_variables[0].constraint = keras.constraints.NonNeg()
        with pytest.raises(TowerError, match="concurrent workers cannot do"):
            fit(model)


def test_a_loop_that_reads_weights_does_not_write_them(strategy):
    def build():
        keras.utils.set_random_seed(1)
        return linear(keras.layers.Reshape((3, 2)), keras.layers.LSTM(2))

    model, reference = build(), build()
    fit(reference)
    with strategy("DistributedReplicatedStrategy", towers=2):
        fit(model)
    assert_same_model(model, reference, 1e-5)


def test_a_fit_that_fails_after_a_fit_in_it_has_not_finished(strategy):
    """Its worker may be restarted: it does not sign off at the servers."""

    def train_another_and_fail(epoch, logs):
        fit(linear())
        raise Boom

    watch = keras.callbacks.LambdaCallback(on_epoch_end=train_another_and_fail)
    with (mine := strategy()), pytest.raises(Boom):
        fit(linear(), callbacks=[watch])
    assert not mine._peers.connection.finished


def test_the_initial_epoch_of_a_backup_is_restored(strategy, tmp_path):
    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("power cut")

    def trained(strategy):
        model = linear()
        model.optimizer.build(model.trainable_variables)
        backup = keras.callbacks.BackupAndRestore(
            tmp_path / type(strategy).__name__, delete_checkpoint=False
        )
        with pytest.raises(RuntimeError), kt.NoOpStrategy():
            fit(model, epochs=4, callbacks=[backup, Break()])
        with strategy:
            history = model.fit(
                X, Y, 16, 4, shuffle=False, verbose=0, callbacks=[backup]
            )
        assert history.epoch == [2, 3]
        return model._initial_epoch

    assert trained(strategy()) == trained(kt.NoOpStrategy())


def test_the_error_of_a_fit_is_published(strategy):
    model = linear()
    with (mine := strategy()), pytest.raises(ValueError):
        model.fit(X, Y[:5], verbose=0)
    told = mine._runner.last.workers.status(0).failed
    assert told.startswith("ValueError: Data cardinality")


class WithTable(keras.Model):
    """Adds the mean of a table, which has no row per example, to outputs."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["x"]) + tf.reduce_mean(inputs["table"])


def test_a_step_that_is_traced_again_is_still_the_workers(strategy):
    """Its batches turn out to have a table, which is not divided."""
    specs = {"x": tf.TensorSpec([None, 4]), "table": tf.TensorSpec([None, 2])}

    def batches():
        for _ in range(4):
            yield {"x": tf.ones([6, 4]), "table": tf.ones([3, 2])}, tf.ones(6)

    data = tf.data.Dataset.from_generator(
        batches, output_signature=(specs, tf.TensorSpec([None]))
    )
    model, functions = WithTable(), []
    model.compile("sgd", "mse")

    def note(batch, logs=None):
        functions.append(model.train_function)

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    with strategy("DistributedParameterServerStrategy"):
        model.fit(data, verbose=0, callbacks=[watch])
    assert [type(f) for f in functions] == [TrainFunction] * 4
