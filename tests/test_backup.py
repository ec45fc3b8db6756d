"""Training that a signal ends, and that goes on when it is started again."""

import os
import signal

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers import backup

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X @ np.ones((3, 1), "float32")


def model(units=1):
    keras.utils.set_random_seed(1)
    built = keras.Sequential(
        [
            keras.layers.Input((3,)),
            keras.layers.Dropout(0.3),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(units),
        ]
    )
    built.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return built


class Signal(keras.callbacks.Callback):
    """Sends this process a signal behind a batch."""

    def __init__(self, number, epoch, batch):
        super().__init__()
        self.number, self.when = number, (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.number and (self.epoch, batch) == self.when:
            os.kill(os.getpid(), self.number)


def train(folder, *callbacks, made=None, **options):
    made = made or model()
    last = kt.Backup(folder, **options)
    with kt.TowerStrategy(2):
        history = made.fit(X, Y, 5, 3, 0, callbacks=[*callbacks, last])
    return made, history


def interrupted(folder, epoch, batch, number=signal.SIGTERM, **options):
    with pytest.raises(SystemExit) as ended:
        train(folder, Signal(number, epoch, batch), **options)
    assert ended.value.code == 75


def assert_equal(one, other):
    for a, b in zip(one[0].get_weights(), other[0].get_weights(), strict=True):
        # Towers' statistics are averaged sooner, which rounds otherwise.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    for name, values in other[1].history.items():
        np.testing.assert_allclose(one[1].history[name], values, rtol=1e-5)
    assert one[1].epoch == other[1].epoch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.core
def test_it_goes_on_behind_the_same_batch(tmp_path, undisturbed):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
    interrupted(tmp_path, 0, 2)
    # The last batch of an epoch, and once more in what is then left.
    interrupted(tmp_path, 1, 4, signal.SIGUSR1)
    assert_equal(train(tmp_path), undisturbed)
    assert list(tmp_path.iterdir()) == []
    after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
    assert after == handlers


def test_callbacks_that_count_anew_are_named(tmp_path, caplog):
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    with pytest.raises(SystemExit):
        train(tmp_path, stopping, Signal(signal.SIGTERM, 0, 1))
    assert "begins anew" not in caplog.text
    train(tmp_path, stopping)
    assert "EarlyStopping begins anew" in caplog.text


def test_one_backup_serves_several_fits(tmp_path):
    made, one = model(), kt.Backup(tmp_path)
    with kt.TowerStrategy(2):
        for _ in range(2):
            made.fit(X, Y, epochs=2, verbose=0, callbacks=[one])
    assert int(made.optimizer.iterations) == 4


def test_killed_without_a_signal(tmp_path, undisturbed):
    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Dies(), every=2)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert_equal(train(tmp_path), undisturbed)


def test_other_models_and_other_files_are_refused(tmp_path):
    interrupted(tmp_path, 0, 1)
    other = model(units=2)
    before = other.get_weights()
    with pytest.raises(kt.TowerError, match="backup of another model"):
        train(tmp_path, made=other)
    for a, b in zip(other.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    (tmp_path / "backup.npz").write_bytes(b"PK nonsense")
    with pytest.raises(kt.TowerError, match="delete it"):
        train(tmp_path)


def test_only_one_by_itself_is_taken(tmp_path):
    one = kt.Backup(tmp_path)
    with kt.TowerStrategy(2):
        for given, words in (
            ([kt.EveryRank(one)], "without EveryRank"),
            ([kt.ChiefOnly(one)], "without ChiefOnly"),
            ([one, kt.Backup(tmp_path)], "Backup and Backup"),
        ):
            with pytest.raises(kt.TowerError, match=words):
                model().fit(X, Y, verbose=0, callbacks=given)


def test_each_fit_of_a_folder_has_a_file_of_its_own(tmp_path):
    first = train(tmp_path)
    interrupted(tmp_path, 0, 1)
    # As in a new process, in which the first one is run again.
    backup._ended.clear()
    assert_equal(train(tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 1
    assert_equal(train(tmp_path), first)
    assert list(tmp_path.iterdir()) == []


def test_outside_of_a_block_it_says_what_to_do(tmp_path):
    with pytest.raises(kt.TowerError, match=r"TowerStrategy\(1\)"):
        model().fit(X, Y, verbose=0, callbacks=[kt.Backup(tmp_path)])
    with kt.TowerStrategy(1):
        model().fit(X, Y, verbose=0, callbacks=[kt.Backup(tmp_path)])
