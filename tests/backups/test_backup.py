"""Training that a signal ends, and that goes on when it is started again."""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import checkpoint
from keras_towers.jobs.rendezvous import commits
from tests.backups.backing_up import (
    TOLERANCE,
    X,
    Y,
    assert_equal,
    ends,
    failing_at,
    interrupted,
    kill,
    model,
    train,
)
from tests.kit.again import begin_again
from tests.kit.compare import assert_all_close
from tests.kit.leaving import Boom
from tests.kit.meshes import on_a_mesh
from tests.kit.training import adam, stacked

pytestmark = pytest.mark.alternate


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
    begin_again()
    assert handlers() == before
    # In what is then left of the epoch, and behind the last batch of another.
    interrupted(last, 0, 1)
    interrupted(last, 1, 4, signal.SIGUSR1)
    assert "starts afresh" not in caplog.text
    # As of a process that was killed while it wrote.
    (tmp_path / "last" / "backup" / "ckpt-99.rank-1.index").touch()
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    assert_equal(train(last, stopping), undisturbed)
    assert "EarlyStopping starts afresh" in caplog.text
    assert list((tmp_path / "last").iterdir()) == []
    assert handlers() == before


def test_it_goes_on_with_other_towers_columns_and_shards(
    tmp_path, small_shards
):
    """Each reads what it needs, however that was cut when it was written."""
    made = stacked(
        lambda: [keras.layers.Dense(n, name=f"of_{n}") for n in (4, 6, 1)],
        (3,),
        optimizer=adam,
        loss=keras.losses.MeanSquaredError,
    )

    def fit(strategy, *callbacks):
        with strategy:
            mine = made()
            options = {"epochs": 4, "verbose": 0, "callbacks": [*callbacks]}
            return mine, mine.fit(X, Y, 5, **options)

    strategies = [
        lambda: kt.TowerStrategy(2, weights="sharded"),
        lambda: on_a_mesh(made().weights, 2),
        lambda: kt.TowerStrategy(3, updates="sharded"),
        lambda: on_a_mesh(made().weights, 1),
        lambda: kt.TowerStrategy(3, weights="sharded"),
    ]
    last = kt.Backup(tmp_path)
    for number, make in enumerate(strategies[:4]):
        ending = ends(number, 1, kill(signal.SIGTERM))
        with pytest.raises(SystemExit):
            fit(make(), ending, last)
        begin_again()
    found = fit(strategies[4](), last)
    plain = made()
    assert_equal(found, (plain, plain.fit(X, Y, 5, epochs=4, verbose=0)))


def test_each_fit_of_a_folder_has_a_file_of_its_own(tmp_path):
    """Also where one callback serves them all, and on the only tower."""
    last = kt.Backup(tmp_path)
    options = {"towers": 1, "validation_data": (X[:7], Y[:7])}

    def on_one(act, *arguments):
        made = model(normalize=False)
        return act(last, *arguments, made=made, **options)

    first = on_one(train)
    assert int(first[0].optimizer.iterations) == 15
    on_one(interrupted, 0, 1)
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
    interrupted(last, 2, 1, **options)
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
        interrupted(last, *when, made=Alternating())
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


def dataset(seed=3):
    # As a new process makes it.
    keras.utils.set_random_seed(1)
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.shuffle(len(X), seed=seed).batch(5)


@pytest.mark.parametrize(
    "read",
    [
        *(lambda n=n: Batches(workers=n) for n in (1, 2)),
        *(dataset, lambda: dataset().filter(lambda x, y: True)),
    ],
    ids=["sequence", "two workers", "dataset", "dataset of unknown length"],
)
def test_shuffled_data_go_on_in_the_same_order(tmp_path, read):
    last, before = kt.Backup(tmp_path), random.getstate()
    for when in (1, 2), (2, 1):
        interrupted(last, *when, data=(read(),))
        # A script that is started again may have drawn other numbers.
        random.seed(1)
    resumed = train(last, data=(read(),))
    random.setstate(before)
    plain = model()
    history = plain.fit(read(), epochs=3, verbose=0)
    assert_equal(resumed, (plain, history))


class Killed(BaseException):
    """Ends the script."""


def trials(folder=None, killed_in=None):
    """Train a model per learning rate, of which the first one diverges."""
    found = []

    def fail(epoch, logs, rate):
        if (rate, epoch) == (0.1, 1):
            raise Boom
        if (rate, epoch) == killed_in:
            raise Killed

    for rate in (0.1, 0.02, 0.01):
        made = model(normalize=False)
        made.compile(keras.optimizers.Adam(rate), "mse")
        fails = functools.partial(fail, rate=rate)
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=fails)]
        if folder is not None:
            callbacks.insert(0, kt.Backup(folder))
        with contextlib.suppress(Boom), kt.TowerStrategy(1):
            made.fit(X, Y, 5, epochs=3, verbose=0, callbacks=callbacks)
        found += [*made.get_weights(), made.optimizer.learning_rate.numpy()]
    return found


def test_a_call_that_fails_counts(tmp_path, caplog):
    """The next one does not go on from its backup, nor does a new process."""
    wanted = trials()
    for killed_in in (0.02, 1), (0.01, 2):
        begin_again()
        with pytest.raises(Killed):
            trials(tmp_path, killed_in)
    begin_again()
    assert_all_close(trials(tmp_path), wanted, 0)
    (kept,) = tmp_path.iterdir()
    assert kept.name == "backup.failed"
    assert f"its backup is kept as {kept}" in caplog.text
    # Renamed, it is a backup again.
    kept.rename(tmp_path / "backup")
    begin_again()
    found = trials(tmp_path)
    assert not np.allclose(found[0], wanted[0])
    assert_all_close(found[3:], wanted[3:], 0)


def test_after_an_error_no_backup_is_promised(tmp_path, monkeypatch):
    """To the launcher, which would tell ranks to make one, and wait."""
    reported = []
    monkeypatch.setattr(commits, "report_resumes", reported.append)

    def fail(*_):
        raise Boom

    fails = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(Boom):
        train(kt.Backup(tmp_path), fails, towers=1)
    assert reported == [True, False]


def test_calls_in_callbacks_keep_their_numbers(tmp_path):
    """A fit that goes on in a later epoch does not repeat those before."""

    def train_both(killed_in=None):
        outer, seen = model(), []

        def fit_inner(epoch, logs=None):
            inner = model(normalize=False)

            def end(at, logs=None):
                seen.append((epoch, at))
                if (epoch, at) == killed_in:
                    raise Killed

            ends = keras.callbacks.LambdaCallback(on_epoch_end=end)
            both = [kt.Backup(tmp_path), ends]
            inner.fit(X, Y, 5, epochs=2, verbose=0, callbacks=both)

        fits = keras.callbacks.LambdaCallback(on_epoch_end=fit_inner)
        return train(kt.Backup(tmp_path), fits, made=outer, towers=1), seen

    for killed_in in (1, 0), (2, 0):
        with pytest.raises(Killed):
            train_both(killed_in)
        begin_again()
    _, seen = train_both()
    assert seen == [(2, 1)]


@pytest.mark.parametrize("options", [{}, {"weights": "sharded"}])
def test_steps_go_on_while_a_backup_is_written(
    tmp_path, monkeypatch, small_shards, options
):
    """It has the values of its batch; the next one waits for it.

    ``look`` is called behind the backup.
    """
    may_write, seen = threading.Event(), []
    write = checkpoint.write

    def write_later(*arguments):
        assert may_write.wait(60)
        write(*arguments)

    def look(batch, logs=None):
        if batch == 1:
            seen.append(made.get_weights())
        if batch == 2:
            assert not (tmp_path / "backup" / "checkpoint").exists()
            may_write.set()
        if batch == 3:
            # The first one is complete, and the next one may be written.
            plain = model()
            kt.load_backup(plain, tmp_path)
            seen.append(plain.get_weights())
            os.kill(os.getpid(), signal.SIGTERM)

    made = model()
    undisturbed = train(kt.Backup(tmp_path), **options)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(checkpoint, "write", write_later)
        looks = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        last = kt.Backup(tmp_path, every=2, asynchronous=True)
        train(looks, last, made=made, **options)
    assert_all_close(seen[1], seen[0], 0)
    begin_again()
    assert_equal(train(last, **options), undisturbed)


def test_what_ends_the_writing_of_a_backup_ends_fit(tmp_path, monkeypatch):
    full = tf.errors.ResourceExhaustedError(None, None, "No space left")
    failing_at(monkeypatch, 0, full)
    words = "cannot write to .*No space left.*no backup yet: make room"
    with pytest.raises(kt.TowerError, match=words):
        train(kt.Backup(tmp_path, every=2, asynchronous=True))


def test_any_folder_that_tensorflow_reaches(tmp_path):
    folder = f"ram://{tmp_path}"
    undisturbed = train(kt.Backup(tmp_path))
    interrupted(kt.Backup(folder), 1, 1)
    assert_equal(train(kt.Backup(folder)), undisturbed)
    assert not tf.io.gfile.exists(f"{folder}/backup/checkpoint")


def test_a_plain_model_gets_the_weights_of_a_backup(tmp_path):
    """TensorFlow reads them, too; others are refused, and nothing changes."""
    trained, _ = train(kt.Backup(tmp_path, delete=False))
    plain = keras.models.clone_model(model())
    for folder in tmp_path, tmp_path / "backup":
        plain.set_weights([np.zeros(w.shape) for w in plain.get_weights()])
        kt.load_backup(plain, folder)
        assert_all_close(plain.get_weights(), trained.get_weights(), 0)
    reader = tf.train.load_checkpoint(str(tmp_path / "backup"))
    names = sorted(reader.get_variable_to_shape_map())
    assert re.fullmatch(r"weights/005/.*dense/bias", names[-1])
    names = [name for name in names if name.startswith("weights/")]
    kept = [reader.get_tensor(name) for name in names]
    assert_all_close(kept, trained.get_weights(), 0)
    other = model(units=2)
    before = other.get_weights()
    with pytest.raises(
        kt.TowerError, match=r"kernel \[3, 1\].*kernel \[3, 2\]"
    ):
        kt.load_backup(other, tmp_path)
    assert_all_close(other.get_weights(), before, 0)
    for folder in tmp_path / "none", tmp_path.parent:
        with pytest.raises(kt.TowerError, match="no complete backup in"):
            kt.load_backup(plain, folder)
    shutil.copytree(tmp_path / "backup", tmp_path / "backup-1")
    with pytest.raises(kt.TowerError, match=r"2 calls of fit: give one of"):
        kt.load_backup(plain, tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda one: [kt.EveryRank(one)], "without EveryRank"),
        (lambda one: [kt.ChiefOnly(one)], "without ChiefOnly"),
        (lambda one: [one, one], "Backup and Backup"),
        (lambda one: [kt.Backup("a", every=0)], "every=0 batches: give 1"),
        (lambda one: [kt.Backup("a", keep=0)], "keep=0 backups: give 1"),
        (lambda one: kt.Backup("a", every="epoch"), "give a whole number or"),
        (lambda one: kt.Backup("a", every=True), "every=True is not allowed"),
        (lambda one: kt.Backup(5), "folder=5 is not allowed: give a text or a"),
        (lambda one: kt.Backup("a", delete="no"), "'no' is .* give True or F"),
    ],
)
def test_what_is_refused(given, words, tmp_path):
    one = kt.Backup(tmp_path)
    with pytest.raises(kt.TowerError, match=words), kt.TowerStrategy(2):
        model().fit(X, Y, verbose=0, callbacks=given(one))


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
