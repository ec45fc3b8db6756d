"""Callbacks that write files, and go on from them."""

import csv

import keras
import pytest

import keras_towers as kt
from tests.fit.one_device import trained
from tests.kit.compare import assert_all_close, assert_close, assert_exact
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import STEPS, X, Y, fit, linear

callbacks = keras.callbacks
EPOCHS = 2


def writing(folder):
    """Callbacks that write into a folder, and change the learning rate."""
    return [
        callbacks.ReduceLROnPlateau(
            monitor="loss", factor=0.5, patience=0, min_delta=10.0
        ),
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        callbacks.CSVLogger(folder / "log.csv"),
        callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
        callbacks.ModelCheckpoint(
            folder / "{batch}.weights.h5", save_weights_only=True, save_freq=2
        ),
        callbacks.ModelCheckpoint(
            folder / "best.keras", monitor="val_loss", save_best_only=True
        ),
        callbacks.TensorBoard(
            folder / "board", histogram_freq=1, update_freq=1
        ),
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folders that one device and three towers write, in this order."""
    folders = []

    def act(model):
        folders.append(tmp_path_factory.mktemp("written"))
        history = fit(
            model,
            EPOCHS,
            callbacks=writing(folders[-1]),
            validation_data=(X[:20], Y[:20]),
            validation_batch_size=9,
        )
        # Both had their say: reduced from the second epoch on.
        rate = float(model.optimizer.learning_rate)
        assert_close(rate, 0.1 * 0.5 * 0.9**2, 1e-6)
        return history

    found = assert_exact(linear, act, kt.TowerStrategy(2))
    return folders, found.returned


def test_csv(written):
    (_, folder), history = written
    with (folder / "log.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert_close([float(row["loss"]) for row in rows], history["loss"], 1e-6)


def test_model_checkpoint(written):
    """Files of every epoch, of every second batch and of the best one."""
    folders, _ = written
    paths = [*folders[0].glob("*.keras"), *folders[0].glob("*.h5")]
    assert len(paths) >= EPOCHS + 2
    for path in paths:
        models = []
        for folder in folders:
            if path.suffix == ".h5":
                models.append(linear())
                models[-1].load_weights(folder / path.name)
            else:
                models.append(keras.models.load_model(folder / path.name))
        wanted, found = models
        for a, b in zip(wanted.variables, found.variables, strict=True):
            assert_close(b.numpy(), a.numpy(), message=path.name)


def test_backup_and_restore(tmp_path):
    """Killed in the second epoch; a new process goes on where it was saved."""
    ran = []

    def backed_up(model, dies=False):
        def count(batch, logs):
            ran.append(batch)
            if dies and len(ran) == STEPS + 3:
                raise KeyboardInterrupt

        counting = callbacks.LambdaCallback(on_train_batch_end=count)
        folder = tmp_path / "backup"
        backup = callbacks.BackupAndRestore(folder)
        fit(model, EPOCHS, callbacks=[backup, counting])
        assert not (folder / "latest.weights.h5").exists()

    killed, model = linear(), linear()
    with pytest.raises(KeyboardInterrupt), kt.TowerStrategy(2):
        backed_up(killed, dies=True)
    assert_ordinary(killed)
    ran.clear()
    with kt.TowerStrategy(2):
        backed_up(model)
    # The first epoch is not run again, and the end is the same.
    assert len(ran) == STEPS
    assert_all_close(model.weights, trained(EPOCHS).weights, 4e-6)
