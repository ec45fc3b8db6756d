"""Replicas in one process: what counts, what is dropped, what is refused."""

import gc
import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.errors import TowerError
from keras_towers.sync_replicas import accumulators, group, resources
from tests.exactness import models as m
from tests.kit.compare import close, same_history, same_model
from tests.kit.leaving import WAYS, Boom
from tests.kit.long import long_but
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import STEPS, X, Y, classifier, fit
from tests.strategies.async_cases import SameShape, Sleeps, dataset, within
from tests.strategies.test_async_errors import Refuses, checked, some_bad

TARGETS = (Y == 1).astype("float32")[:, None]


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[index : index + 8], Y[index : index + 8]


def _generator():
    while True:
        yield X[:8], Y[:8]


SOURCES = {
    "arrays": (lambda: {"x": X, "y": Y, "batch_size": 16}, 4),
    "one batch": (lambda: {"x": X, "y": Y, "batch_size": 64}, 1),
    "unknown length": (lambda: {"x": dataset().filter(lambda *_: True)}, 7),
    "generator": (lambda: {"x": _generator(), "steps_per_epoch": 6}, 6),
    "PyDataset": (lambda: {"x": Pieces()}, 5),
}


@pytest.mark.parametrize(
    "source, aggregate",
    # Each with one number, in turn.
    long_but(
        lambda case: case[1] == (2, 5)[[*SOURCES].index(case[0]) % 2],
        itertools.product(SOURCES, (2, 5)),
    ),
)
def test_every_batch_is_averaged_once(source, aggregate):
    make, batches = SOURCES[source]
    updates = -(-batches // aggregate)
    model = classifier(steps_per_execution=2)
    with kt.SyncReplicasStrategy(aggregate, 2) as strategy:
        for epochs in (1, 3):
            model.fit(**make(), epochs=epochs, verbose=0)
            counts = strategy.counts
            assert counts.updates == epochs * updates
            assert sum(counts.used) == epochs * batches
            assert counts.dropped == (0, 0)
    assert int(model.optimizer.iterations) == 4 * updates


def test_a_slow_replica_is_a_backup():
    """Nobody waits for it, and what it brings too late is counted."""
    layer = Sleeps(0.02, 0.02, 0.02, 0.4)
    model = classifier(layer)
    with kt.SyncReplicasStrategy(3, 4) as strategy:
        history = model.fit(
            dataset().repeat(), steps_per_epoch=60, epochs=2, verbose=0
        ).history
        counts = strategy.counts
    used, dropped = np.array(counts.used), np.array(counts.dropped)
    np.testing.assert_array_equal(used + dropped, layer.steps)
    assert sum(layer.steps) == 120
    assert dropped[3] > 0 and 0 < layer.steps[3] < 20
    assert counts.updates == int(model.optimizer.iterations)
    assert 30 <= counts.updates <= 42
    assert sum(history["dropped_gradients"]) == sum(dropped)


class BreaksLate(SameShape):
    """Sleeps on replica 3, whose outputs are not numbers either."""

    def call(self, inputs):
        if "CPU:3" not in tf.identity(inputs).device:
            return inputs
        slow = Sleeps(0, 0, 0, 0.5)
        return slow(inputs) * float("nan")


def test_a_gradient_that_is_too_late_reaches_no_weight():
    model = classifier(BreaksLate())
    with kt.SyncReplicasStrategy(3, 4) as strategy:
        # The slow replica's first gradient comes long after it was wanted.
        model.fit(dataset().repeat(), steps_per_epoch=60, verbose=0)
        counts = strategy.counts
    assert counts.dropped[3] >= 1
    assert counts.used[3] == 0
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_what_is_dropped_is_told(tmp_path, caplog):
    caplog.set_level("INFO", "keras_towers")
    board = keras.callbacks.TensorBoard(tmp_path)
    table = tmp_path / "log.csv"
    model = classifier(Sleeps(0.01, 0.2))
    with kt.SyncReplicasStrategy(1, 2) as strategy:
        history = model.fit(
            dataset().repeat(),
            steps_per_epoch=40,
            epochs=2,
            verbose=0,
            callbacks=[board, keras.callbacks.CSVLogger(table)],
        ).history
        counts = strategy.counts
    assert f"SyncReplicasStrategy: {counts}" in caplog.messages
    assert "dropped_gradients" in table.read_text()
    dropped = history["dropped_gradients"]
    assert sum(dropped) == sum(counts.dropped) > 0
    found = {}
    for file in sorted(tmp_path.glob("train/*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                found[value.tag, event.step] = number
    for epoch in (0, 1):
        assert found["epoch_dropped_gradients", epoch] == dropped[epoch]
        of_each = [
            found[f"dropped_gradients/replica_{replica}", epoch]
            for replica in (0, 1)
        ]
        assert sum(of_each) == dropped[epoch]
    assert "epoch_staleness_mean" not in {tag for tag, _ in found}


class Hangs(SameShape):
    """Does not come back on replica 1, until it is let go."""

    def __init__(self):
        super().__init__()
        self.free = threading.Event()

    def call(self, inputs):
        if "CPU:1" not in tf.identity(inputs).device:
            return inputs

        def wait(values):
            self.free.wait(60)
            return values

        outputs = tf.py_function(wait, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)


@pytest.mark.parametrize("aggregate", [1, 2])
def test_a_replica_that_hangs_is_an_error(aggregate):
    layer = Hangs()
    model = checked(layer)

    def train():
        error = pytest.raises(TowerError, match=r"for 2 s: replicas \[1\] of 2")
        strategy = kt.SyncReplicasStrategy(aggregate, 2, stall_timeout=2)
        with strategy, error:
            fit(model)

    try:
        within(30, train)
    finally:
        layer.free.set()
        for thread in threading.enumerate():
            if thread.name.startswith("keras_towers-async"):
                thread.join(20)
    assert_ordinary(model)


def test_shared_tokens():
    """Any replica may compute any gradient: a slow one computes less."""
    layer = Sleeps(0.01, 0.2)
    model = classifier(layer)
    with kt.SyncReplicasStrategy(4, 2, tokens="shared") as strategy:
        model.fit(dataset().repeat(), steps_per_epoch=40, verbose=0)
        counts = strategy.counts
    assert sum(counts.used) + sum(counts.dropped) == 40
    assert layer.steps[0] > 2 * layer.steps[1]
    assert int(model.optimizer.iterations) == counts.updates


@pytest.mark.parametrize("replicas", [1, 2])
def test_moving_averages(replicas):
    model = classifier()
    seen = [[w.numpy() for w in model.trainable_variables]]

    def note(*_):
        seen.append([w.numpy() for w in model.trainable_variables])

    def average():
        found, *later = seen
        for values in later:
            found = [
                0.9 * old + 0.1 * new
                for old, new in zip(found, values, strict=True)
            ]
        return found

    def check():
        for weight, wanted in zip(
            model.trainable_variables, average(), strict=True
        ):
            close(strategy.average_of(weight), wanted)

    averages = tf.train.ExponentialMovingAverage(0.9)
    strategy = kt.SyncReplicasStrategy(
        replicas, replicas, variable_averages=averages
    )
    with pytest.raises(TowerError, match="no moving average of"):
        strategy.average_of(model.trainable_variables[0])
    with strategy:
        # One update an epoch.
        watch = keras.callbacks.LambdaCallback(on_epoch_end=note)
        whole = {"x": X, "y": Y, "batch_size": -(-len(X) // replicas)}
        model.fit(**whole, epochs=4, verbose=0, callbacks=[watch])
        check()
        model.train_on_batch(X, Y)
        note()
        check()
    check()
    assert_ordinary(model)


def test_rows_that_several_gradients_of_a_replica_share():
    """Adam squares each slice of a row: their sum would be another update."""

    class Twice(keras.Model):
        """Two optimizers, one of which trains an embedding."""

        def __init__(self):
            super().__init__()
            self.words = keras.layers.Embedding(3, 4)
            self.head = keras.layers.Dense(3)
            self.other = keras.optimizers.Adam(0.01)

        def call(self, inputs):
            return self.head(keras.ops.mean(self.words(inputs), 1))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            both = [self.words.embeddings, self.head.kernel]
            words, head = tape.gradient(loss, both)
            self.optimizer.apply([words], both[:1])
            self.other.apply([head], both[1:])
            return {"loss": loss}

    def train(strategy, batch_size):
        keras.utils.set_random_seed(1)
        model = Twice()
        model(m.TOKENS[:1] % 3)
        model.compile(keras.optimizers.Adam(0.01), m.cross_entropy())
        model.other.build([model.head.kernel])
        model.optimizer.build([model.words.embeddings])
        with strategy:
            model.fit(
                m.TOKENS % 3,
                m.LABELS,
                batch_size=batch_size,
                epochs=2,
                shuffle=False,
                verbose=0,
            )
        return model

    four = train(kt.TowerStrategy(1), 16)
    mine = train(kt.SyncReplicasStrategy(4, 2), 4)
    for found, wanted in zip(mine.weights, four.weights, strict=True):
        close(found, wanted, 1e-5)


def test_an_error_of_a_replica_is_raised_and_leaves_nothing():
    """What the others had pushed is not averaged later."""
    model = checked(Refuses())
    originals = Originals(model)
    strategy = kt.SyncReplicasStrategy(3, 3)

    def train():
        with strategy:
            with pytest.raises(tf.errors.OpError, match="too large"):
                fit(model, x=some_bad(2), epochs=3)
            before = int(model.optimizer.iterations)
            fit(model)
            assert strategy.counts.updates == 2
            assert sorted(strategy.counts.used) == [1, 1, 2]
            assert int(model.optimizer.iterations) == before + 2

    within(60, train)
    originals.assert_back()
    assert_ordinary(model)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("way", WAYS)
def test_leaving_in_a_callback(way):
    """Gradients that were not averaged do not mix with those of later fits."""
    error, leave = WAYS[way]

    def after_one(batch, logs):
        leave()

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=after_one)
    model, reference = classifier(), classifier()
    originals = Originals(model)
    wanted = reference.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    with kt.SyncReplicasStrategy(2, 2) as strategy:
        weights = model.get_weights()
        with pytest.raises(error):
            fit(model, callbacks=[stop])
        if int(model.optimizer.iterations):
            pytest.skip("both had come by then")
        for mine, other in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(mine, other)
        found = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        assert strategy.counts.dropped == (0, 0)
        assert sum(strategy.counts.used) == 7
    same_history(found.history, wanted.history)
    same_model(model, reference)
    originals.assert_back()
    assert_ordinary(model)


def test_fits_of_several_models():
    first, second, reference = classifier(), classifier(), classifier()
    fit(reference, epochs=2)
    with kt.SyncReplicasStrategy(2, 2) as strategy:
        small = {"batch_size": 8, "shuffle": False, "verbose": 0}
        first.fit(X, Y, **small)
        second.fit(X, Y, **small, epochs=2)
        assert strategy.counts.updates == 2 * STEPS
        first.fit(X, Y, **small)
        assert strategy.counts.updates == STEPS
        for model in (first, second):
            same_model(model, reference)
        first.compile("sgd", first.loss)
        fit(first)
        assert strategy.counts.updates == STEPS // 2
    assert strategy.counts.updates == STEPS // 2


def test_evaluating_in_a_callback_changes_nothing():
    """Nothing is averaged before it is complete."""
    reference, model = classifier(), classifier()
    x, y = X[:32], Y[:32]
    fit(reference, x=x, y=y)
    counted = []

    def look(batch, logs):
        model.evaluate(x, y, batch_size=32, verbose=0)
        counted.append(int(model.optimizer.iterations))

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    with kt.SyncReplicasStrategy(2, 2):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        model.fit(data, verbose=0, callbacks=[watch])
    assert counted == [0, 1, 1, 2]
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other)


def test_training_in_a_callback():
    model, other = classifier(), classifier()
    refused = []

    def once_more(epoch, logs):
        with pytest.raises(TowerError, match="inside its own fit") as error:
            fit(model)
        refused.append(error)
        model.train_on_batch(X[:8], Y[:8])
        fit(other)

    watch = keras.callbacks.LambdaCallback(on_epoch_end=once_more)

    def train():
        with kt.SyncReplicasStrategy(2, 2):
            fit(model, epochs=2, callbacks=[watch])

    within(60, train)
    assert len(refused) == 2
    assert int(model.optimizer.iterations) == 2 * (2 + 1)
    assert int(other.optimizer.iterations) == 2 * 2


def test_other_calls_in_the_block():
    model, reference = classifier(), classifier()
    wanted = [
        reference.train_on_batch(X[:16], Y[:16]),
        reference.evaluate(X, Y, verbose=0),
    ]
    outputs = reference.predict(X, verbose=0)
    with kt.SyncReplicasStrategy(3, 2):
        close(model.train_on_batch(X[:16], Y[:16]), wanted[0])
        close(model.evaluate(X, Y, verbose=0), wanted[1])
        close(model.predict(X, verbose=0), outputs)
    same_model(model, reference)


def test_a_custom_loop_is_synchronous():
    model, reference = classifier(), classifier()
    strategy = kt.SyncReplicasStrategy(3, 2)

    def step(model, x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)

    with strategy:
        model.predict(X[:2], verbose=0)
        run = tf.function(lambda: strategy.run(step, (model, X[:8], Y[:8])))
        run()
        run()
    for _ in range(2):
        step(reference, X[:8], Y[:8])
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other)
    assert_ordinary(model)


def test_cycles_leave_nothing_behind(monkeypatch):
    """Neither graphs nor threads nor what is on the devices."""
    destroyed = []
    original = resources.destroy

    def destroy(handle, device):
        destroyed.append(handle)
        original(handle, device)

    for module in (accumulators, group, resources):
        monkeypatch.setattr(module, "destroy", destroy)
    model = classifier()

    def cycles(number):
        for _ in range(number):
            with kt.SyncReplicasStrategy(2, 2):
                fit(model)
        gc.collect()
        graphs = [g for g in gc.get_objects() if issubclass(type(g), tf.Graph)]
        return threading.active_count(), len(graphs)

    threads, graphs = cycles(2)
    # Queues of two replicas and of events, what is complete, the step; and
    # four gradients.
    assert len(destroyed) == 2 * (5 + 4)
    with pytest.raises(tf.errors.OpError):
        tf.raw_ops.QueueSizeV2(handle=destroyed[-5])
    after = cycles(3)
    assert after[0] <= threads
    assert after[1] <= graphs


def test_an_error_while_tracing():
    class Fails(SameShape):
        def call(self, inputs):
            if "CPU:1" in tf.identity(inputs).device:
                raise Boom("only on replica 1")
            return inputs

    model = checked(Fails())
    with pytest.raises(Boom), kt.SyncReplicasStrategy(2, 2):
        fit(model)
    assert_ordinary(model)


def test_eager_steps_are_refused():
    model = classifier(run_eagerly=True)
    with kt.SyncReplicasStrategy(2, 2):
        with pytest.raises(TowerError, match="needs compiled steps"):
            fit(model)
        with pytest.raises(TowerError, match="needs compiled steps"):
            model.train_on_batch(X, Y)
        model.evaluate(X, Y, verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_a_step_that_updates_nothing_is_refused():
    class Idle(keras.Sequential):
        def train_step(self, data):
            return {"loss": keras.ops.mean(self(data[0]))}

    model = Idle([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    with (
        kt.SyncReplicasStrategy(2, 2),
        pytest.raises(TowerError, match="updates nothing"),
    ):
        fit(model, y=TARGETS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "at least 1 gradient"),
        ((-1,), "at least 1 gradient"),
        ((2.0,), "give the number of gradients"),
        ((True,), "give the number of gradients"),
        ((2, 99), "99"),
        ((2, 0), "0"),
        ((2, 2, 0.9), "ExponentialMovingAverage"),
        ((2, 2, None, "each"), "tokens='each'"),
        ((2, 2, None, "shared", 3), "contradicts"),
        ((5000, 2), "too many"),
        ((2, 2, None, "shared", None, 0), "stall_timeout=0"),
        ((2, 2, None, "shared", None, 9, None, "split"), "batches='split'"),
    ],
)
def test_what_cannot_be(arguments, message):
    with pytest.raises(TowerError, match=message):
        kt.SyncReplicasStrategy(*arguments)
