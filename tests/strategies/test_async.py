"""Asynchronous towers: nothing is lost, and all that can be exact is."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_towers as kt
from keras_towers.strategies import registry
from tests.exactness import models as m
from tests.fit.ordinary import (
    BATCH,
    STEPS,
    Originals,
    X,
    Y,
    assert_ordinary,
    classifier,
    close,
    fit,
    same_history,
)

BINARY = (Y == 1).astype("float32")[:, None]


def on_tower(tensor: tf.Tensor) -> int:
    """The tower that is computing (or tracing) this."""
    return int(tf.identity(tensor).device.rsplit(":", 1)[1])


class Sleeps(keras.layers.Layer):
    """Takes so many seconds on each tower, and notes whose turn it was."""

    def __init__(self, *seconds):
        super().__init__()
        self.seconds = seconds
        self.steps = [0] * len(seconds)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def call(self, inputs):
        tower = on_tower(inputs)

        def wait(values):
            self.steps[tower] += 1
            time.sleep(self.seconds[tower])
            return values

        outputs = tf.py_function(wait, [inputs], inputs.dtype)
        return tf.ensure_shape(outputs, inputs.shape)


class Counts(keras.layers.Layer):
    """Counts its training steps in a weight."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1)
        return inputs


def linear(optimizer):
    """A model whose gradients do not depend on its weights.

    So the sum of all updates is the same in every order.
    """
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(optimizer, lambda y, out: out * y)
    return model


def still():
    """A classifier that does not learn, so that metrics can be compared."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.0),
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
    )
    return model


@pytest.mark.parametrize("towers, steps_per_execution", [(2, 1), (4, 3)])
def test_metrics_are_exact_sums(towers, steps_per_execution):
    def history(model):
        model.steps_per_execution = steps_per_execution
        return fit(
            model,
            epochs=3,
            y=BINARY,
            class_weight={0: 1.0, 1: 3.0},
            validation_data=(X, BINARY),
        )

    wanted = history(still())
    with kt.AsyncTowerStrategy(towers):
        found = history(still())
    same_history(found, wanted)


def test_callbacks_see_every_step_and_the_last_exactly():
    steps, last = [], {}

    def note(batch, logs):
        steps.append(batch)
        last.update(logs)

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    with kt.AsyncTowerStrategy(3):
        model = still()
        history = fit(model, epochs=2, y=BINARY, callbacks=[watch])
    assert steps == [*range(STEPS)] * 2
    assert last.keys() == history.keys()
    for name, values in history.items():
        close(last[name], values[-1])


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return X[index : index + 8], Y[index : index + 8]


def _generator():
    while True:
        yield X[:8], Y[:8]


def _dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


SOURCES = {
    "arrays": (lambda: {"x": X, "y": Y, "batch_size": 16}, 4),
    "one batch": (lambda: {"x": X, "y": Y, "batch_size": 64}, 1),
    "dataset": (lambda: {"x": _dataset()}, 7),
    "unknown length": (lambda: {"x": _dataset().filter(lambda *_: True)}, 7),
    "some steps": (
        lambda: {"x": _dataset().repeat(), "steps_per_epoch": 4},
        4,
    ),
    "generator": (lambda: {"x": _generator(), "steps_per_epoch": 6}, 6),
    "PyDataset": (lambda: {"x": Pieces()}, 5),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_batch_is_one_step(source):
    make, batches = SOURCES[source]
    model = classifier(Counts(), steps_per_execution=2)
    with kt.AsyncTowerStrategy(3) as strategy:
        for epochs in (1, 3):
            model.fit(**make(), epochs=epochs, verbose=0)
            assert strategy.staleness.steps == batches
    assert int(model.optimizer.iterations) == 4 * batches
    # Other state of the model is shared too, and counts every step.
    assert int(model.layers[1].count) == 4 * batches


@pytest.mark.parametrize("scale", [True, False])
def test_no_update_is_lost(scale):
    reference = linear(keras.optimizers.SGD(0.5 / 4 if scale else 0.5))
    fit(reference, y=BINARY, epochs=10)
    model = linear(keras.optimizers.SGD(0.5))
    originals = Originals(model)
    with kt.AsyncTowerStrategy(4, scale_gradient=scale):
        fit(model, y=BINARY, epochs=10)
    originals.assert_back()
    assert_ordinary(model)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other, 1e-5)


def test_gradient_accumulation_loses_nothing():
    def optimizer():
        return keras.optimizers.SGD(0.5, gradient_accumulation_steps=4)

    reference = linear(optimizer())
    fit(reference, y=BINARY, epochs=25)
    model = linear(optimizer())
    with kt.AsyncTowerStrategy(4, scale_gradient=False):
        fit(model, y=BINARY, epochs=25)
    assert int(model.optimizer.iterations) == 25
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other, 1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: m.momentum(clipnorm=1.0),
        lambda: keras.optimizers.AdamW(0.01),
        lambda: keras.optimizers.Adam(
            0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
        ),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01)
        ),
    ],
    ids=["momentum", "adamw", "ema", "loss-scale"],
)
def test_optimizers_learn(make):
    model = classifier(optimizer=make)
    with kt.AsyncTowerStrategy(3):
        loss = fit(model, epochs=12)["loss"]
    assert loss[-1] < 0.95 * loss[0]
    assert int(model.optimizer.iterations) == 12 * STEPS


def test_several_optimizers():
    model = m.Gan()
    model.compile(m.momentum(), keras.optimizers.Adam(0.01))
    with kt.AsyncTowerStrategy(3):
        assert np.isfinite(fit(model, y=None, epochs=3)["critic_loss"]).all()
    for optimizer in (model.generator_optimizer, model.critic_optimizer):
        assert int(optimizer.iterations) == 3 * STEPS


def test_logs_that_are_no_metrics():
    model = m.OwnStep()
    model.compile("sgd")
    with kt.AsyncTowerStrategy(3):
        history = fit(model, epochs=2)
    assert history.keys() == {"loss", "this_batch"}
    assert np.isfinite(history["this_batch"]).all()


def test_sparse_gradients_and_dropout():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(12, 5),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.1),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile("adam", m.cross_entropy())
    with kt.AsyncTowerStrategy(3):
        loss = fit(model, epochs=15, x=m.TOKENS, y=m.LABELS)["loss"]
    assert loss[-1] < loss[0]


def test_as_accurate_as_synchronous_towers():
    digits = load_digits()
    x, y = (digits.images / 16).astype("float32").reshape(-1, 64), digits.target

    def accuracy(strategy):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(96, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile("adam", m.cross_entropy(), metrics=["accuracy"])
        with strategy:
            model.fit(x[:1400], y[:1400], epochs=25, verbose=0)
        return model.evaluate(x[1400:], y[1400:], verbose=0)[1]

    wanted = accuracy(kt.TowerStrategy(4))
    assert accuracy(kt.AsyncTowerStrategy(4)) > wanted - 0.01


def test_a_slow_tower_holds_nobody():
    """All sleep: what is measured does not depend on how busy the cores are."""

    def seconds(*towers):
        layer = Sleeps(*towers)
        model = classifier(layer)
        begin = []
        clock = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: begin.append(time.monotonic())
        )
        data = _dataset().repeat()
        with kt.AsyncTowerStrategy(4):
            model.fit(
                data,
                steps_per_epoch=160,
                epochs=2,
                verbose=0,
                callbacks=[clock],
            )
            took = time.monotonic() - begin[1]
        assert sum(layer.steps) == int(model.optimizer.iterations) == 320
        return took, layer.steps

    alike, steps = seconds(0.02, 0.02, 0.02, 0.02)
    assert min(steps) > 40
    one_slow, steps = seconds(0.02, 0.02, 0.02, 0.2)
    assert 0 < steps[3] < 30
    # Waiting for the slow one in every step would give 0.1.
    assert alike / one_slow > 0.5


def test_staleness():
    with kt.AsyncTowerStrategy(4) as strategy:
        assert (strategy.staleness.mean, strategy.staleness.max) == (0, 0)
        model = classifier(Sleeps(0.01, 0.01, 0.01, 0.03))
        model.fit(_dataset().repeat(), steps_per_epoch=40, verbose=0)
        found = strategy.staleness
        assert found.steps == sum(found.histogram.values()) == 40
        assert 1 < found.mean < found.max < 40
        values = np.repeat([*found.histogram], [*found.histogram.values()])
        assert found.mean == pytest.approx(values.mean())
        # Of the last epoch alone.
        fit(model)
        assert strategy.staleness.steps == STEPS


def test_staleness_in_tensorboard(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path)
    with kt.AsyncTowerStrategy(2):
        history = fit(classifier(), epochs=2, callbacks=[board])
    # History is that of the model, with names as on one device.
    assert history.keys() == {"loss", "accuracy"}
    tags = []
    for file in sorted(tmp_path.glob("train/*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            tags += [(value.tag, event.step) for value in event.summary.value]
    for name in ("epoch_staleness_mean", "epoch_staleness_max", "staleness"):
        assert [(name, 0), (name, 1)] == [t for t in tags if t[0] == name]


def test_other_methods_are_exact(tmp_path):
    model = classifier(keras.layers.BatchNormalization())
    with kt.AsyncTowerStrategy(3) as strategy:
        fit(model, epochs=2)
        inside = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        outputs = model.predict(X, batch_size=BATCH, verbose=0)
        model.save(tmp_path / "inside.keras")
    close(model.evaluate(X, Y, batch_size=BATCH, verbose=0), inside)
    close(model.predict(X, batch_size=BATCH, verbose=0), outputs)
    model.save(tmp_path / "after.keras")
    for name in ("inside", "after"):
        loaded = keras.models.load_model(tmp_path / f"{name}.keras")
        close(loaded.predict(X, verbose=0), outputs)
        assert int(loaded.optimizer.iterations) == 2 * STEPS
    # And on one device, and on towers that wait.
    fit(model)
    with kt.TowerStrategy(2):
        fit(model)
    with strategy:
        fit(model)
    assert int(model.optimizer.iterations) == 5 * STEPS


def test_train_on_batch_is_that_of_one_device():
    reference, model = classifier(), classifier()
    wanted = [reference.train_on_batch(X[:9], Y[:9]) for _ in range(3)]
    with kt.AsyncTowerStrategy(3):
        close([model.train_on_batch(X[:9], Y[:9]) for _ in range(3)], wanted)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine, other)


def test_evaluating_in_a_callback_waits_for_the_towers():
    model = classifier(Sleeps(0, 0.05, 0.05))
    counted = []

    def evaluate(batch, logs):
        model.predict(X, verbose=0)
        counted.append(int(model.optimizer.iterations))

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=evaluate)
    with kt.AsyncTowerStrategy(3):
        fit(model, callbacks=[watch])
    assert counted == [1, 2, 3, 4]


def test_eager_models_take_turns():
    model = classifier(run_eagerly=True)
    with kt.AsyncTowerStrategy(3) as strategy:
        fit(model, epochs=2)
        assert strategy.staleness.histogram == {0: STEPS}
    assert int(model.optimizer.iterations) == 2 * STEPS


def test_a_model_built_inside_and_a_custom_loop():
    strategy = kt.strategy("async", towers=2)
    assert isinstance(strategy, tf.distribute.Strategy)
    with strategy.scope():
        model = classifier(optimizer=lambda: keras.optimizers.SGD(0.1))
    fit(model, epochs=2)
    assert int(model.optimizer.iterations) == 2 * STEPS

    @tf.function
    def step(x, y):
        def on_replica(x, y):
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        return strategy.run(on_replica, (x, y))

    with strategy.scope():
        losses = strategy.experimental_local_results(step(X, Y))
    assert len(losses) == 2
    assert int(model.optimizer.iterations) == 2 * STEPS + 1


def test_one_tower_is_plain_training():
    reference, model = classifier(), classifier()
    wanted = fit(reference, epochs=2)
    with kt.AsyncTowerStrategy(1) as strategy:
        same_history(fit(model, epochs=2), wanted)
        assert strategy.staleness.max == 0


def test_says_what_runs():
    assert "async" in registry.strategy_names()
    said = kt.strategy("async", towers=3, scale_gradient=False).describe()
    assert said.startswith("AsyncTowerStrategy: 3 towers (/device:CPU:0 to")
    assert "not scaled" in said
    assert kt.AsyncTowerStrategy(2).mode == "async"


def test_bad_input():
    with pytest.raises(kt.TowerError, match="0"):
        kt.AsyncTowerStrategy(0)
    with pytest.raises(kt.TowerError, match="GPU:7"):
        kt.AsyncTowerStrategy(["/device:GPU:7"])
    with pytest.raises(kt.TowerError, match="does not take .*mode"):
        kt.strategy("async", mode="nccl")
    model = classifier()
    with kt.AsyncTowerStrategy(2) as strategy:
        with pytest.raises(kt.TowerError, match="distributed dataset"):
            model.fit(strategy.experimental_distribute_dataset(_dataset()))
        for nothing in (
            _dataset().take(0),
            _dataset().filter(lambda *_: False),
        ):
            with pytest.raises(kt.TowerError, match="empty"):
                model.fit(nothing, verbose=0)
        model.fit(X[:1], Y[:1], verbose=0)
    assert_ordinary(model)
