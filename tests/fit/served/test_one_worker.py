"""A job of one worker, whose parameter server is this process."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.errors import TowerError
from keras_towers.strategies import servers
from tests.exactness import models as m
from tests.kit.compare import same_model
from tests.kit.training import X, Y, classifier, fit

_numbers = itertools.count()


@pytest.fixture
def strategy(job, monkeypatch):
    """Creates a strategy of a job of one worker."""

    def make(name, *args, **kwargs):
        connection = job(1).connect(0)
        monkeypatch.setattr(servers, "take_role", lambda *_: connection)
        kwargs["cluster"] = connection.cluster
        return getattr(kt, name)(*args, **kwargs)

    return make


def normalised():
    return m.mlp(keras.layers.BatchNormalization(momentum=0.5))


def on_server(strategy, variable):
    return strategy._components.calls.last.model.masters.of(variable).numpy()


@pytest.mark.parametrize(
    "name", ["DistributedReplicatedStrategy", "SyncReplicasStrategy"]
)
def test_the_servers_hold_what_a_checkpoint_holds(strategy, name, tmp_path):
    """Also within an epoch, and what no optimizer trains."""
    model = normalised()
    model.compile("sgd", m.cross_entropy())
    file = tmp_path / "model.weights.h5"
    save = keras.callbacks.ModelCheckpoint(
        file, save_freq=3, save_weights_only=True
    )
    found = []

    def look(batch, logs):
        if batch == 2:
            other = normalised()
            other.compile("sgd", m.cross_entropy())
            other.load_weights(file)
            there = [on_server(mine, v) for v in model.weights]
            found.append((other.get_weights(), there))

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    with (mine := strategy(name)):
        fit(model, callbacks=[save, watch])
    ((saved, there),) = found
    for a, b in zip(saved, there, strict=True):
        np.testing.assert_array_equal(a, b)
    # After a step they are not what they were.
    assert not np.allclose(saved[-1], 1)


def test_the_logs_have_what_they_have_in_one_process(strategy, tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path)
    with strategy("SyncReplicasStrategy", tokens="shared"):
        served = fit(classifier(), epochs=2, callbacks=[board])
    with kt.SyncReplicasStrategy(1, 2, tokens="shared"):
        here = fit(classifier(), epochs=2)
    assert list(served) == list(here)
    assert served["dropped_gradients"] == [0, 0]
    tags = {
        (value.tag, event.step)
        for file in tmp_path.glob("train/*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    for epoch in (0, 1):
        assert ("epoch_dropped_gradients", epoch) in tags
        assert ("dropped_gradients/replica_0", epoch) in tags
    with strategy("SyncReplicasStrategy"):
        assert "dropped_gradients" not in fit(classifier())


def test_xla_compiles_what_a_worker_computes(strategy, caplog):
    model, reference = (classifier(jit_compile=True) for _ in range(2))
    fit(reference)
    with strategy("DistributedReplicatedStrategy"):
        fit(model)
    same_model(model, reference)
    assert "jit_compile" not in caplog.text


def test_fits_in_a_fit(strategy):
    model, other, reference = classifier(), classifier(), classifier()
    refused = []

    def once_more(epoch, logs):
        with pytest.raises(TowerError, match="inside its own fit") as error:
            fit(model)
        refused.append(error)
        fit(other)

    watch = keras.callbacks.LambdaCallback(on_epoch_end=once_more)
    with (mine := strategy("SyncReplicasStrategy")):
        fit(model, epochs=3, callbacks=[watch])
    # Of the fit that has ended last.
    assert mine.counts.updates == 3 * 4
    assert len(refused) == 3
    fit(reference, epochs=3)
    same_model(model, reference)
    same_model(other, reference)


def test_where_a_backup_begins_is_left_as_it_was(strategy, tmp_path):
    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("power cut")

    def trained(strategy):
        folder = tmp_path / f"backup{next(_numbers)}"
        backup = keras.callbacks.BackupAndRestore(
            folder, delete_checkpoint=False
        )
        model = classifier()
        with pytest.raises(RuntimeError):
            fit(model, epochs=4, callbacks=[backup, Break()])
        with strategy:
            history = model.fit(
                *(X, Y, 16, 4), shuffle=False, verbose=0, callbacks=[backup]
            )
        assert history.epoch == [2, 3]
        return model._initial_epoch

    assert trained(strategy("SyncReplicasStrategy")) == trained(
        kt.TowerStrategy(1)
    )


def test_an_error_of_a_fit_is_told_to_the_others(strategy):
    model = classifier()
    with (mine := strategy("SyncReplicasStrategy")), pytest.raises(ValueError):
        model.fit(X, Y[:5], verbose=0)
    told = mine._components.calls.last.workers._failed.items()[0]
    assert told.startswith("ValueError: Data cardinality")
