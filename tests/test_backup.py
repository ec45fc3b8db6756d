"""Training that a signal ends, and that goes on when it is started again."""

import io
import os
import random
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import backup
from tests.kit.compare import assert_all_close, assert_same_history
from tests.kit.sampling import sample_of

pytestmark = pytest.mark.alternate

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X @ np.ones((3, 1), "float32")
# Towers' statistics are averaged sooner, which rounds otherwise.
TOLERANCE = 1e-5


def model(units=1, normalize=True):
    keras.utils.set_random_seed(1)
    first = [keras.Input((3,)), keras.layers.Dropout(0.3)]
    if normalize:
        first.append(keras.layers.BatchNormalization())
    built = keras.Sequential([*first, keras.layers.Dense(units)])
    built.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return built


def ends(epoch, batch, act):
    """A callback that does something behind a batch."""
    at = keras.callbacks.Callback()
    at.on_epoch_begin = lambda number, logs=None: setattr(at, "epoch", number)
    at.on_train_batch_end = lambda number, logs=None: (
        act() if (at.epoch, number) == (epoch, batch) else None
    )
    return at


def kill(number):
    return lambda: os.kill(os.getpid(), number)


def train(last, *callbacks, made=None, towers=2, data=(X, Y, 5), **options):
    made = made or model()
    # A backup has the mean of all towers' statistics all the same.
    with kt.TowerStrategy(towers, sync_every_epoch=False):
        history = made.fit(
            *data, epochs=3, verbose=0, callbacks=[*callbacks, last], **options
        )
    return made, history


def interrupted(last, *when, **options):
    with pytest.raises(SystemExit) as ended:
        train(last, ends(*when), **options)
    assert ended.value.code == 75


def assert_equal(one, other):
    assert_all_close(one[0].weights, other[0].weights, TOLERANCE)
    assert_same_history(one[1].history, other[1].history, TOLERANCE)
    assert one[1].epoch == other[1].epoch


def handlers():
    return [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]


def test_it_goes_on_behind_the_same_batch(tmp_path, caplog):
    """Wherever it ended, and whatever ended it; only what it had goes on."""

    def die():
        raise KeyboardInterrupt

    undisturbed = train(kt.Backup(tmp_path / "undisturbed"))
    before, last = handlers(), kt.Backup(tmp_path / "last", every=2)
    with pytest.raises(KeyboardInterrupt):
        train(last, ends(0, 3, die))
    assert handlers() == before
    # In what is then left of the epoch, and behind the last batch of another.
    interrupted(last, 0, 1, kill(signal.SIGTERM))
    interrupted(last, 1, 4, kill(signal.SIGUSR1))
    assert "starts afresh" not in caplog.text
    # As of a process that was killed while it wrote.
    (tmp_path / "last" / f"1{backup._PARTIAL}").touch()
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    assert_equal(train(last, stopping), undisturbed)
    assert "EarlyStopping starts afresh" in caplog.text
    assert list((tmp_path / "last").iterdir()) == []
    assert handlers() == before


def test_each_fit_of_a_folder_has_a_file_of_its_own(tmp_path):
    """Also where one callback serves them all, and on the only tower."""
    last = kt.Backup(tmp_path)
    options = {"towers": 1, "validation_data": (X[:7], Y[:7])}

    def on_one(act, *arguments):
        made = model(normalize=False)
        return act(last, *arguments, made=made, **options)

    first = on_one(train)
    assert int(first[0].optimizer.iterations) == 15
    on_one(interrupted, 0, 1, kill(signal.SIGTERM))
    # As in a new process, in which the first one is run again.
    backup._ended.clear()
    assert_equal(on_one(train), first)
    assert len(list(tmp_path.iterdir())) == 1
    assert_equal(on_one(train), first)
    assert list(tmp_path.iterdir()) == []


def test_training_may_begin_in_a_later_epoch(tmp_path):
    """And validate in some of the epochs."""
    options = {
        "initial_epoch": 1,
        "validation_data": (X[:7], Y[:7]),
        "validation_freq": 2,
    }
    plain = model()
    with kt.TowerStrategy(2):
        history = plain.fit(X, Y, 5, epochs=3, verbose=0, **options)
    last = kt.Backup(tmp_path)
    interrupted(last, 2, 1, kill(signal.SIGTERM), **options)
    resumed = train(last, **options)
    assert resumed[1].epoch == [1, 2]
    assert len(resumed[1].history["val_loss"]) == 1
    assert_equal(resumed, (plain, history))


class Alternating(keras.Model):
    """Two optimizers, which its step builds; it cannot be called."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.parts = [
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            for _ in range(2)
        ]
        self.trained_by = (
            keras.optimizers.Adam(name="one"),
            keras.optimizers.Nadam(name="other"),
        )
        self.compile()

    def train_step(self, data):
        logs = {}
        for part, optimizer in zip(self.parts, self.trained_by, strict=True):
            with tf.GradientTape() as tape:
                errors = tf.reduce_mean((part(data[0]) - data[1]) ** 2, 0)
                loss = tf.reduce_sum(errors)
            weights = part.trainable_variables
            grads = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(grads, weights, strict=True))
            logs[optimizer.name] = errors
        return logs


def test_slots_that_only_a_step_makes_and_vectors_of_a_history(tmp_path):
    last = kt.Backup(tmp_path)
    undisturbed = train(last, made=Alternating())
    for when in (0, 4), (2, 1):
        interrupted(last, *when, kill(signal.SIGTERM), made=Alternating())
        # As in a new process.
        backup._ended.clear()
    one, other = train(last, made=Alternating()), undisturbed
    for its, same in zip(one[0].trained_by, other[0].trained_by, strict=True):
        assert_all_close(its.variables, same.variables, TOLERANCE)
    assert_all_close(one[0].weights, other[0].weights, TOLERANCE)
    assert np.shape(other[1].history["one"]) == (3, 2)
    for name, values in other[1].history.items():
        np.testing.assert_allclose(one[1].history[name], values, TOLERANCE)


class Batches(keras.utils.PyDataset):
    """Eight batches, which ``fit`` shuffles."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        rows = slice(3 * index, 3 * index + 3)
        return X[rows], Y[rows]


@pytest.mark.parametrize("workers", sample_of([1, 2]))
def test_shuffled_sequences_go_on_in_the_same_order(tmp_path, workers):
    options = {"data": (Batches(workers=workers),)}
    last = kt.Backup(tmp_path / "last")
    before = random.getstate()
    interrupted(last, 1, 2, kill(signal.SIGTERM), **options)
    # A script that is started again may have drawn other numbers.
    random.seed(1)
    resumed = train(last, **options)
    random.setstate(before)
    plain = model()
    history = plain.fit(*options["data"], epochs=3, verbose=0)
    assert_equal(resumed, (plain, history))


@pytest.mark.parametrize("length", ["known", "unknown"])
def test_a_shuffled_dataset_goes_on_in_the_same_order(tmp_path, length):
    def read():
        # As a new process makes it.
        keras.utils.set_random_seed(1)
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        data = data.shuffle(len(X), seed=3).batch(5)
        return data if length == "known" else data.filter(lambda x, y: True)

    last = kt.Backup(tmp_path)
    for when in (1, 2), (2, 1):
        interrupted(last, *when, kill(signal.SIGTERM), data=(read(),))
    resumed = train(last, data=(read(),))
    plain = model()
    history = plain.fit(read(), epochs=3, verbose=0)
    assert_equal(resumed, (plain, history))


def test_another_model_is_refused_in_the_middle_of_an_epoch(tmp_path):
    """Of other weights or metrics; it is left as it was."""
    last = kt.Backup(tmp_path)
    interrupted(last, 0, 1, kill(signal.SIGTERM))
    wider, with_mape = model(units=2), model()
    with_mape.compile(with_mape.optimizer, "mse", metrics=["mae", "mape"])
    for other, said in (
        (wider, "backup of another model"),
        (with_mape, "compiled differently"),
    ):
        untrained = other.get_weights()
        with pytest.raises(kt.TowerError, match=said):
            train(last, made=other)
        assert_all_close(other.get_weights(), untrained, 0)


def without_position():
    """A file of arrays, but not what a backup has."""
    file = io.BytesIO()
    np.savez(file, np.array("{}"))
    return file.getvalue()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda one: [one], "delete it"),
        (lambda one: [kt.EveryRank(one)], "without EveryRank"),
        (lambda one: [kt.ChiefOnly(one)], "without ChiefOnly"),
        (lambda one: [one, one], "Backup and Backup"),
        (lambda one: [kt.Backup("a", every=0)], "every=0 batches: give 1"),
    ],
)
@pytest.mark.parametrize("found", [b"PK nonsense", b"", without_position()])
def test_what_is_refused(given, words, found, tmp_path):
    (tmp_path / "backup.npz").write_bytes(found)
    one = kt.Backup(tmp_path)
    with pytest.raises(kt.TowerError, match=words), kt.TowerStrategy(2):
        model().fit(X, Y, verbose=0, callbacks=given(one))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": "epoch"}, "every='epoch' is not allowed: give a whole numb"),
        ({"every": True}, "every=True is not allowed: give a whole number or"),
        ({"folder": 5}, "folder=5 is not allowed: give a text or a path"),
        ({"delete": "no"}, "delete='no' is not allowed: give True or False"),
    ],
)
def test_values_that_are_not_allowed(options, words):
    with pytest.raises(kt.TowerError, match=words):
        kt.Backup(**({"folder": "a"} | options))


def test_outside_of_a_block_it_says_what_to_do(tmp_path):
    with pytest.raises(kt.TowerError, match=r"TowerStrategy\(1\)"):
        model().fit(X, Y, verbose=0, callbacks=[kt.Backup(tmp_path)])


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(
    tmp_path,
):
    (tmp_path / "file").touch()
    began = []
    note = keras.callbacks.LambdaCallback(on_train_begin=began.append)
    for place, why in (
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "below", "Not a directory"),
        ("a\0b", "null"),
    ):
        words = rf"cannot write to the folder .*{why}.*give Backup another"
        with pytest.raises(kt.TowerError, match=words):
            train(kt.Backup(place), note)
    assert not began
