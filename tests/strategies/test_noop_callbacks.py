"""What callbacks see, and what they compute, where steps do nothing."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.training import compiled

X, Y = m.FEATURES, m.LABELS


def test_logs():
    given = {"loss": 0.5, "accuracy": 0.25}
    model = compiled()()
    seen = []
    batch_end = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs)
    )
    with kt.NoOpStrategy(given):
        history = model.fit(
            X,
            Y,
            epochs=2,
            verbose=0,
            validation_data=(X, Y),
            callbacks=[batch_end],
        )
        assert model.train_on_batch(X, Y) == [0.5, 0.25]
    assert history.history == {
        "loss": [0.5] * 2,
        "accuracy": [0.25] * 2,
        "val_loss": [0.5] * 2,
        "val_accuracy": [0.25] * 2,
    }
    assert seen[0] == given


def test_callbacks_that_need_a_number(tmp_path):
    model = compiled()()
    path = str(tmp_path / "{epoch}-{val_loss:.2f}.keras")
    callbacks = [
        keras.callbacks.ModelCheckpoint(path),
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.EarlyStopping("val_loss", patience=2),
    ]
    with kt.NoOpStrategy({"loss": 1}):
        history = model.fit(
            X,
            Y,
            epochs=9,
            verbose=0,
            callbacks=callbacks,
            validation_data=(X, Y),
        )
    assert history.epoch == [0, 1, 2]
    assert (tmp_path / "3-1.00.keras").exists()


def test_what_callbacks_compute_is_computed():
    model = compiled()()
    wanted = model.evaluate(X, Y, verbose=0)
    predicted = model.predict(X, verbose=0)

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.found = self.model.evaluate(X, Y, verbose=0)
            self.predicted = self.model.predict(X, verbose=0)
            self.on_batch = self.model.test_on_batch(X, Y)
            assert self.model.train_on_batch(X, Y) == []

        def on_train_batch_end(self, batch, logs=None):
            self.in_batch = self.model.predict_on_batch(X)

    callback = Evaluate()
    with kt.NoOpStrategy():
        history = model.fit(
            X,
            Y,
            epochs=2,
            verbose=0,
            callbacks=[callback],
            validation_data=(X, Y),
        )
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), wanted)
    assert history.epoch == [0, 1]
    np.testing.assert_allclose(callback.found, wanted)
    np.testing.assert_allclose(callback.on_batch, wanted, rtol=1e-6)
    np.testing.assert_allclose(callback.predicted, predicted, rtol=1e-6)
    np.testing.assert_allclose(callback.in_batch, predicted, rtol=1e-5)


def test_stopped_by_a_callback():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    with kt.NoOpStrategy():
        history = compiled()().fit(
            X, Y, batch_size=8, epochs=5, verbose=0, callbacks=[Stop()]
        )
    assert history.epoch == [0]


@pytest.mark.parametrize("logs", [0.5, "loss", ["loss"]])
def test_logs_that_are_none(logs):
    with pytest.raises(kt.TowerError, match="logs="):
        kt.NoOpStrategy(logs)
