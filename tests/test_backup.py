"""Training that a signal ends, and that goes on when it is started again."""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import backup_folder
from keras_towers.backup_folder import CallFolder
from keras_towers.fit.weights import checkpoint
from keras_towers.rendezvous import commits
from keras_towers.saved_training import SavedTraining
from keras_towers.transport import SingleProcess
from tests.kit.again import begin_again
from tests.kit.compare import assert_all_close, assert_same_history
from tests.kit.leaving import Boom
from tests.kit.meshes import on_a_mesh
from tests.kit.sampling import sample_of
from tests.kit.training import adam, stacked

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


def train(
    last,
    *callbacks,
    made=None,
    towers=2,
    data=(X, Y, 5),
    weights=None,
    **options,
):
    made = made or model()
    # A backup has the mean of all towers' statistics all the same.
    with kt.TowerStrategy(towers, sync_every_epoch=False, weights=weights):
        history = made.fit(
            *data, epochs=3, verbose=0, callbacks=[*callbacks, last], **options
        )
    return made, history


def interrupted(last, *when, **options):
    """Train until a signal; what follows is as in a new process."""
    with pytest.raises(SystemExit) as ended:
        train(last, ends(*when), **options)
    assert ended.value.code == 75
    begin_again()


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
    begin_again()
    assert handlers() == before
    # In what is then left of the epoch, and behind the last batch of another.
    interrupted(last, 0, 1, kill(signal.SIGTERM))
    interrupted(last, 1, 4, kill(signal.SIGUSR1))
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
    on_one(interrupted, 0, 1, kill(signal.SIGTERM))
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


def compiled_with(*arguments, **options):
    made = model()
    made.compile(*arguments, **options)
    return made


ADAM = keras.optimizers.Adam
OF_ANOTHER = {
    "layers": (model, lambda: model(units=2), "units of layer 3 (Dense)"),
    "rate": (
        lambda: compiled_with(ADAM(0.1), "mse"),
        lambda: compiled_with(ADAM(0.2), "mse"),
        "learning_rate of the optimizer (0.1",
    ),
    "option": (
        lambda: compiled_with(ADAM(0.1), "mse"),
        lambda: compiled_with(ADAM(0.1, clipnorm=1.0), "mse"),
        "clipnorm of the optimizer (None in the backup, 1.0 now)",
    ),
    "optimizer": (
        lambda: compiled_with(ADAM(0.1), "mse"),
        lambda: compiled_with(keras.optimizers.SGD(0.1), "mse"),
        "differently: optimizer (Adam in the backup, SGD now). Make",
    ),
    "loss": (
        lambda: compiled_with(ADAM(0.1), "mse"),
        lambda: compiled_with(ADAM(0.1), "mae"),
        "loss ('mse' in the backup, 'mae' now)",
    ),
    "metrics": (
        lambda: compiled_with(ADAM(0.1), "mse", metrics=["mae"]),
        lambda: compiled_with(ADAM(0.1), "mse", metrics=["mape"]),
        "metrics (['mae'] in the backup, ['mape'] now)",
    ),
}


@pytest.mark.parametrize("what", OF_ANOTHER)
def test_the_backup_of_another_model_is_refused(what, tmp_path):
    """In the middle of an epoch; the model is left as it was."""
    make, other, said = OF_ANOTHER[what]
    last = kt.Backup(tmp_path)
    interrupted(last, 0, 1, kill(signal.SIGTERM), made=make())
    made = other()
    untrained = made.get_weights()
    words = f"is the backup of another model.*{re.escape(said)}.*kt.load_back"
    with pytest.raises(kt.TowerError, match=words):
        train(last, made=made)
    assert_all_close(made.get_weights(), untrained, 0)
    begin_again()
    train(last, made=make())


def test_other_data_are_said(tmp_path, caplog):
    last = kt.Backup(tmp_path, delete=False)
    interrupted(last, 1, 2, kill(signal.SIGTERM))
    train(last)
    assert "other data" not in caplog.text
    shutil.rmtree(tmp_path)
    begin_again()
    interrupted(last, 1, 2, kill(signal.SIGTERM))
    train(last, data=(X[:20], Y[:20], 4), shuffle=False)
    words = "data: batch_size (5 in the backup, 4 now); examples of the last "
    assert f"{words}batch (4 in the backup, None now); shuffle" in caplog.text
    assert "are done (3 of epoch 2)" in caplog.text


def test_what_changes_no_result_may_differ(tmp_path):
    """Names, seeds, first values; epochs, and the metrics behind one."""

    def make(count, **options):
        first = ["ones", "zeros"]
        for _ in range(count):
            keras.layers.Dense(1)
        made = keras.Sequential(
            [
                keras.layers.Dropout(0.3, seed=count),
                keras.layers.Dense(1, kernel_initializer=first[count]),
            ],
            name=f"mine_{count}",
        )
        made.compile(ADAM(0.1, name=f"adam_{count}"), "mse", **options)
        return made

    last = kt.Backup(tmp_path)
    interrupted(last, 0, 4, kill(signal.SIGTERM), made=make(0))
    # A Sequential is built, too, which the first one was not.
    other = make(1, metrics=["mae"])
    other.build((None, 3))
    with kt.TowerStrategy(1):
        history = other.fit(X, Y, 5, epochs=4, verbose=2, callbacks=[last])
    assert history.epoch == [0, 1, 2, 3]


def rewrite(folder, change):
    """Change the notes of a backup, and their checksum."""
    (path,) = folder.glob("backup/*.json")
    facts = json.loads(path.read_text())
    del facts["crc32"]
    change(facts)
    facts["crc32"] = backup_folder._checksum(facts)
    path.write_text(json.dumps(facts))


def test_a_rate_that_depends_on_the_number_of_ranks(tmp_path, caplog):
    """That of the backup holds, and it is said."""
    last = kt.Backup(tmp_path)
    interrupted(last, 0, 1, kill(signal.SIGTERM))
    rewrite(tmp_path, lambda it: it["settings"].update(ranks=2))
    made = compiled_with(ADAM(0.02), "mse", metrics=["mae"])
    train(last, made=made)
    assert float(made.optimizer.learning_rate) == pytest.approx(0.01)
    assert "the number of ranks has changed, and so has learning" in caplog.text


def test_settings_that_another_version_of_keras_does_not_have(tmp_path):
    last = kt.Backup(tmp_path)
    interrupted(last, 0, 1, kill(signal.SIGTERM))

    def change(facts):
        facts["settings"]["keras"] = "3.0"
        settings = facts["settings"]["model"]
        settings["another of the optimizer"] = "1"
        del settings["beta_1 of the optimizer"]

    rewrite(tmp_path, change)
    train(last)


def same_everywhere(value):
    """A model all of whose weights have one value."""
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    made.compile(ADAM(0.1), "mse")
    made.optimizer.build(made.trainable_variables)
    made.set_weights([np.full(w.shape, value) for w in made.get_weights()])
    return made


def opened(folder, made):
    """What goes on with the last backup of a folder, in a new process."""
    begin_again()
    saved = SavedTraining(folder)
    saved.read(SingleProcess(), made, 0)
    saved.attach(made)
    return saved


def commit(saved, made, epoch):
    made.set_weights([np.full(w.shape, epoch) for w in made.get_weights()])
    saved.position.epoch = epoch
    saved.commit()


WRITES = (
    (checkpoint, "write"),
    (checkpoint, "merge"),
    (CallFolder, "_write"),
    (CallFolder, "_sync"),
    (CallFolder, "_rename"),
    (CallFolder, "_remove"),
)


def failing_at(patch, number, error):
    """Let a write fail, by its number, before or after it had its effect."""
    done = itertools.count()

    def fails(original, *arguments):
        if next(done) == number:
            raise error
        original(*arguments)
        if next(done) == number:
            raise error

    for owner, name in WRITES:
        original = getattr(owner, name)
        patch.setattr(*(owner, name), lambda *its, of=original: fails(of, *its))


@pytest.mark.parametrize("before", sample_of([0, 2]))
def test_a_kill_at_any_moment_leaves_the_last_complete_one(
    tmp_path, monkeypatch, before
):
    """Also while ``fit`` deletes it; the first one may be begun again."""
    last = before + 1
    for number in itertools.count():
        folder, allowed = tmp_path / str(number), (before, last)
        made = same_everywhere(0)
        saved = opened(folder, made)
        for epoch in range(1, last):
            commit(saved, made, epoch)
        try:
            with monkeypatch.context() as patch:
                failing_at(patch, number, Killed)
                commit(saved, made, last)
                allowed = (last, 0)
                saved.end(delete=True)
        except Killed:
            is_killed = True
        else:
            is_killed, allowed = False, (0,)
        again = same_everywhere(0)
        saved = opened(folder, again)
        assert saved.position.epoch in allowed
        for weight in again.get_weights():
            assert (weight == saved.position.epoch).all()
        for epoch in 7, 8:
            commit(saved, again, epoch)
        # Nothing is left of what came before.
        kept = {p.name.partition(".")[0] for p in (folder / "backup").iterdir()}
        assert len(kept) == 3
        if not is_killed:
            break
    assert number > 30


@contextlib.contextmanager
def files_of_at_most(size):
    """Let the system refuse to write larger files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_complete_one(tmp_path, monkeypatch):
    made = same_everywhere(0)
    saved = opened(tmp_path, made)
    for written, sizes in (
        ("There is no backup yet", (4, 40, 400)),
        (
            "The backup before it is complete",
            (4, 400),
        ),
    ):
        for size in sizes:
            with pytest.raises(kt.TowerError) as error, files_of_at_most(size):
                commit(saved, made, 2)
            text = str(error.value)
            assert text.startswith("cannot write to "), text
            assert "File too large" in text and f". {written}: make" in text
            assert not re.search(r"rank 0|function_node|\[Op|\n", text), text
        commit(saved, made, 1)
        kt.load_backup(made, tmp_path)
        assert all((weight == 1).all() for weight in made.get_weights())
    full = tf.errors.ResourceExhaustedError(None, None, "No space left")
    for number in (0, 3, 6):
        with monkeypatch.context() as patch:
            failing_at(patch, number, full)
            words = r"cannot write .*No space.*complete: make room"
            with pytest.raises(kt.TowerError, match=words):
                commit(saved, made, 2)
        kt.load_backup(made, tmp_path)
        assert all((weight == 1).all() for weight in made.get_weights())
    commit(saved, made, 3)
    kt.load_backup(made, tmp_path)
    assert all((weight == 3).all() for weight in made.get_weights())


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
    interrupted(kt.Backup(folder), 1, 1, kill(signal.SIGTERM))
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


def flip(path, at=40):
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:9])


DAMAGES = [
    *itertools.product((flip, cut, os.remove), ("index", "data-*", "json")),
    (lambda path: path.write_text("{}"), "json"),
]


def content_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def two_backups(tmp_path_factory):
    """A folder, and the training that it goes on with."""
    folder = tmp_path_factory.mktemp("two")
    undisturbed = train(kt.Backup(folder / "undisturbed"))
    last = kt.Backup(folder / "last", every=2)
    interrupted(last, 1, 3, kill(signal.SIGTERM))
    return folder / "last", undisturbed


@pytest.mark.parametrize(("damage", "of"), sample_of(DAMAGES, 3))
def test_of_two_backups_one_may_be_damaged(
    damage, of, two_backups, tmp_path, caplog
):
    shutil.copytree(two_backups[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "backup"
    assert len([*folder.glob("*.json")]) == 2
    (path,) = folder.glob(f"ckpt-5.{of}")
    damage(path)
    found = SavedTraining(tmp_path)
    found.read(SingleProcess(), model(), 0)
    assert (found.position.epoch, found.position.batch) == (1, 2)
    begin_again()
    kt.load_backup(model(), tmp_path)
    assert caplog.text.count("is damaged (ckpt-5: ") == 2
    assert caplog.text.count("ckpt-4, the backup before it, is used") == 2
    assert_equal(train(kt.Backup(tmp_path)), two_backups[1])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_backup_is_none_of_those_that_are_kept(tmp_path):
    saved = opened(tmp_path, same_everywhere(0))
    for epoch in 1, 2:
        commit(saved, saved._model, epoch)
    cut(tmp_path / "backup" / "ckpt-2.index")
    saved = opened(tmp_path, same_everywhere(0))
    assert saved.position.epoch == 1
    for epoch, wanted in (3, [1, 2, 3]), (4, [3, 4]):
        commit(saved, saved._model, epoch)
        names = CallFolder(str(tmp_path / "backup")).names()
        assert names == [f"ckpt-{number}" for number in wanted]


@pytest.mark.parametrize(("damage", "of"), sample_of(DAMAGES, 3))
def test_damaged_backups_are_refused_and_left(
    damage, of, two_backups, tmp_path
):
    shutil.copytree(two_backups[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "backup"
    for path in folder.glob(f"*.{of}"):
        damage(path)
    left = content_of(folder)
    for goes_on in (
        lambda: train(kt.Backup(tmp_path)),
        lambda: kt.load_backup(model(), tmp_path),
    ):
        begin_again()
        with pytest.raises(kt.TowerError, match=r"damaged.*delete it") as found:
            goes_on()
        assert "\n" not in str(found.value)
    assert content_of(folder) == left


def test_the_file_that_names_backups_may_be_lost(two_backups, tmp_path):
    """But not what it names."""
    shutil.copytree(two_backups[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "backup"
    (folder / "checkpoint").unlink()
    assert_equal(train(kt.Backup(tmp_path)), two_backups[1])
    folder.mkdir()
    (folder / "checkpoint").write_text('model_checkpoint_path: "ckpt-5"')
    begin_again()
    with pytest.raises(kt.TowerError, match="are lost: give them back"):
        train(kt.Backup(tmp_path))


def test_every_byte_counts(tmp_path):
    """One that is flipped is found, or changes nothing that is read."""
    saved = opened(tmp_path, same_everywhere(1))
    saved.commit()
    folder = CallFolder(str(tmp_path / "backup"))

    def values():
        facts = folder.read_notes("ckpt-1")
        reader = tf.train.load_checkpoint(folder.prefix("ckpt-1"))
        names = reader.get_variable_to_shape_map()
        return facts, {n: reader.get_tensor(n).tolist() for n in names}

    before, harmless = values(), 0
    for path in (tmp_path / "backup").glob("ckpt-1.*"):
        for at in range(0, path.stat().st_size, 17):
            flip(path, at)
            if not folder.damage("ckpt-1"):
                harmless += 1
                assert values() == before
            flip(path, at)
    assert folder.damage("ckpt-1") == ""
    assert harmless < 10


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_you_say(tmp_path, keep):
    last = kt.Backup(tmp_path, every=1, keep=keep, delete=False)
    train(last, towers=1)
    kept = [*(tmp_path / "backup").glob("*.json")]
    assert len(kept) == keep
    state = tf.train.get_checkpoint_state(str(tmp_path / "backup"))
    assert len(state.all_model_checkpoint_paths) == keep
    assert tf.train.latest_checkpoint(str(tmp_path / "backup"))


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
