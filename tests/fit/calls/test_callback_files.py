"""Callbacks that write files, and go on from them."""

import csv

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_exact, close
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import STEPS, X, Y, classifier, fit

callbacks = keras.callbacks
VALIDATION = {"validation_data": (X[:20], Y[:20]), "validation_batch_size": 9}


def test_learning_rate_callbacks_and_csv(tmp_path):
    rates = []

    def act(model):
        file = tmp_path / f"log{len(rates)}.csv"
        reduce = callbacks.ReduceLROnPlateau(
            monitor="loss", factor=0.5, patience=0, min_delta=10.0
        )
        schedule = callbacks.LearningRateScheduler(
            lambda epoch, rate: rate * 0.9
        )
        history = fit(
            model,
            epochs=3,
            callbacks=[reduce, schedule, callbacks.CSVLogger(file)],
        )
        rates.append(float(model.optimizer.learning_rate))
        with open(file) as lines:
            rows = list(csv.DictReader(lines))
        assert [row["epoch"] for row in rows] == ["0", "1", "2"]
        close([float(row["loss"]) for row in rows], history["loss"], 1e-6)
        return history

    assert_exact(classifier, act, kt.TowerStrategy(3))
    # Both had their say: reduced from the second epoch on, scheduled thrice.
    close(rates, 0.01 * 0.5**2 * 0.9**3, 1e-6)


def test_model_checkpoint(tmp_path):
    """Files of every epoch, of every second batch and of the best one."""
    folders = []

    def act(model):
        folder = tmp_path / str(len(folders))
        folders.append(folder)
        fit(
            model,
            epochs=2,
            callbacks=[
                callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
                callbacks.ModelCheckpoint(
                    folder / "{batch}.weights.h5",
                    save_weights_only=True,
                    save_freq=2,
                ),
                callbacks.ModelCheckpoint(
                    folder / "best.keras",
                    monitor="val_loss",
                    save_best_only=True,
                ),
            ],
            **VALIDATION,
        )

    assert_exact(classifier, act, kt.TowerStrategy(3))
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) >= 5
    for name in names:
        found = []
        for folder in folders:
            if name.endswith(".h5"):
                found.append(classifier())
                found[-1].load_weights(folder / name)
            else:
                found.append(keras.models.load_model(folder / name))
        for a, b in zip(found[0].variables, found[1].variables, strict=True):
            close(a.numpy(), b.numpy(), message=name)


@pytest.mark.parametrize("save_freq, resumed_on", [("epoch", 2), (3, None)])
def test_backup_and_restore(save_freq, resumed_on, tmp_path):
    """Killed in the second epoch; a new process goes on where it was saved."""
    reference = classifier()
    fit(reference, epochs=3)
    calls = []

    def die(batch, logs):
        calls.append(batch)
        if len(calls) == STEPS + 3:
            raise KeyboardInterrupt

    def backup():
        return callbacks.BackupAndRestore(
            tmp_path / "backup", save_freq=save_freq
        )

    killed = classifier()
    with pytest.raises(KeyboardInterrupt), kt.TowerStrategy(3):
        fit(
            killed,
            epochs=3,
            callbacks=[
                backup(),
                callbacks.LambdaCallback(on_train_batch_end=die),
            ],
        )
    assert_ordinary(killed)
    model = classifier()
    ran = []
    count = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ran.append(batch)
    )
    if resumed_on is None:
        fit(model, epochs=3, callbacks=[backup(), count])
    else:
        with kt.TowerStrategy(resumed_on):
            fit(model, epochs=3, callbacks=[backup(), count])
    if save_freq == "epoch":
        # The first epoch is not run again, and the end is the same.
        assert len(ran) == 2 * STEPS
        for a, b in zip(model.weights, reference.weights, strict=True):
            close(a.numpy(), b.numpy(), 4e-6)
    else:
        # Keras starts the interrupted epoch's data anew: fewer steps differ.
        assert STEPS < len(ran) <= 3 * STEPS
    assert not (tmp_path / "backup" / "latest.weights.h5").exists()


def test_tensorboard(tmp_path):
    scalars = []

    def act(model):
        folder = tmp_path / str(len(scalars))
        board = callbacks.TensorBoard(
            folder, histogram_freq=1, update_freq=1, write_graph=True
        )
        fit(model, epochs=2, callbacks=[board], **VALIDATION)
        (file,) = (folder / "train").glob("events*.v2")
        scalars.append(
            {
                (value.tag, event.step): tf.make_ndarray(value.tensor)
                for event in tf.compat.v1.train.summary_iterator(str(file))
                for value in event.summary.value
                if "epoch_loss" in value.tag
                or "batch_loss" in value.tag
                or "histogram" in value.tag
            }
        )

    assert_exact(classifier, act, kt.TowerStrategy(3))
    wanted, found = scalars
    losses = {key for key in wanted if "loss" in key[0]}
    assert len(losses) >= 2 + 2 * STEPS
    assert {key for key in found if "loss" in key[0]} == losses
    for key in losses:
        close(found[key], wanted[key], message=str(key))
    assert len(found) == len(wanted) > len(losses)
