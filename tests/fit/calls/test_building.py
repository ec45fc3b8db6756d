"""Layers and variables that only a step builds or creates."""

import contextlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights.shards import ShardedVariable
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_exact
from tests.kit.meshes import layout_map, mesh_of
from tests.kit.sampling import sample_of
from tests.kit.training import fit, seeded

pytestmark = pytest.mark.alternate

X = m.FEATURES[:24]


def _mesh():
    layouts = {".*kernel": ("b", None), ".*embeddings": ("b", "a")}
    return kt.ModelParallelStrategy(
        layout_map(mesh_of(2, 2, ("a", "b")), layouts)
    )


WAYS = {
    "towers": lambda: kt.TowerStrategy(3),
    "copies": lambda: kt.TowerStrategy(3, updates="each"),
    "slots in shards": lambda: kt.TowerStrategy(3, updates="sharded"),
    "shards": lambda: kt.TowerStrategy(3, weights="sharded"),
    "mesh": _mesh,
}


class Smallest(keras.metrics.Metric):
    """The smallest of 1 and what each batch is off; 0 once it was reset."""

    def __init__(self):
        super().__init__(name="smallest")
        self.least = self.add_weight(shape=(), initializer="ones")

    def update_state(self, y, y_pred, sample_weight=None):
        off = tf.reduce_max(tf.abs(y - y_pred))
        self.least.assign(tf.minimum(self.least, off))

    def result(self):
        return self.least + 0.0


class SmallestLater(Smallest):
    """Makes its state when it is first updated."""

    def __init__(self):
        keras.metrics.Metric.__init__(self, name="smallest_later")

    def update_state(self, y, y_pred, sample_weight=None):
        if not self.variables:
            self.least = self.add_weight(shape=(), initializer="ones")
        super().update_state(y, y_pred, sample_weight)


class SmallestScore(SmallestLater):
    """The smallest of 1 and the largest scores of batches."""

    def update_state(self, y, y_pred, sample_weight=None):
        super().update_state(tf.zeros_like(y_pred), y_pred, sample_weight)


class Counted(keras.regularizers.Regularizer):
    """Makes a counter when it is first called."""

    def __init__(self):
        self.count = None

    def __call__(self, weight):
        if self.count is None:
            self.count = tf.Variable(0.0, trainable=False)
        self.count.assign_add(1.0)
        return 0.01 * self.count * keras.ops.sum(keras.ops.square(weight))


class Scaled(keras.losses.Loss):
    """Makes its scale when it is first called."""

    scale = None

    def call(self, y, found):
        if self.scale is None:
            start = keras.random.uniform((), 0.9, 1.1, seed=3)
            self.scale = keras.Variable(start, trainable=False)
        self.scale.assign(self.scale * 0.9)
        return keras.ops.mean(keras.ops.square(found) * self.scale, -1)


class Matched(keras.Model):
    """Its loss calls a layer that ``call`` does not: that of the targets.

    As recommenders with a tower for queries and one for candidates have it.
    """

    def __init__(self):
        super().__init__(name="matched")
        self.queries = keras.layers.Embedding(
            96, 4, embeddings_regularizer=Counted()
        )
        self.candidates = keras.Sequential(
            [keras.layers.Embedding(78, 6), keras.layers.Dense(4)]
        )
        self.scaled = Scaled()
        # No step builds it.
        self.unused = keras.layers.Dense(3)
        # No attribute has the variable.
        self.calls = (lambda calls: lambda: calls)(tf.Variable(0.0))

    def call(self, x):
        return self.queries(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        self.calls().assign_add(1.0)
        off = y_pred * self.candidates(y) - 0.5
        return self.scaled(y, off) + sum(self.losses)


QUERIES, CANDIDATES = np.random.default_rng(0).integers(0, 78, (2, 21))


def fitted(model):
    return model.fit(
        QUERIES, CANDIDATES, 6, epochs=2, shuffle=False, verbose=0
    ).history


def _evaluate_first(model):
    found = [model.evaluate(QUERIES, CANDIDATES, 6, verbose=0)]
    return [*found, fitted(model)]


def _predict_first(model):
    model.predict(QUERIES, 6, verbose=0)
    return fitted(model)


def _on_batches(model):
    return [model.train_on_batch(QUERIES, CANDIDATES) for _ in range(2)]


_CALLS = [
    (act, way)
    for act in (fitted, _evaluate_first, _predict_first, _on_batches)
    for way in WAYS
]


@pytest.mark.parametrize(("act", "way"), sample_of(_CALLS, 6))
def test_what_only_the_loss_uses_is_made_by_the_step(act, way, small_shards):
    def used(model):
        found = act(model)
        divided.append(
            any(isinstance(v._value, ShardedVariable) for v in model.weights)
        )
        counted = model.queries.embeddings_regularizer.count
        written = counted, model.scaled.scale, model.calls()
        return found, list(map(float, written))

    divided = []
    make = seeded(
        Matched,
        lambda: keras.optimizers.Adam(0.1),
        loss=lambda: None,
        metrics=lambda: [SmallestScore()],
    )
    assert_exact(make, used, WAYS[way](), in_graph=True)
    assert divided == [False, way in ("shards", "mesh")]


class Drawn(keras.layers.Layer):
    """Draws a seed when it is built."""

    def build(self, shape):
        normal = keras.initializers.RandomNormal()
        self.kernel = self.add_weight(shape=(shape[-1], 3), initializer=normal)

    def call(self, x):
        return x @ self.kernel


class Shuffled(keras.utils.PyDataset):
    """Draws an order when an epoch begins."""

    def __init__(self):
        super().__init__()
        self.order = list(range(len(X)))

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = self.order[8 * index : 8 * index + 8]
        return X[rows], X[rows, :3]

    def on_epoch_begin(self):
        random.shuffle(self.order)


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
def test_nothing_is_built_before_one_device_builds_it(method):
    """Metrics are reset, data are shuffled and layers unfrozen before."""

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([Drawn(), keras.layers.Dense(3)])
        model.layers[1].trainable = False
        metrics = [Smallest(), SmallestLater()]
        model.compile(m.momentum(), "mse", metrics=metrics, jit_compile=False)
        return model

    def act(model):
        def unfreeze(logs):
            model.layers[1].trainable = True

        begins = keras.callbacks.LambdaCallback(on_train_begin=unfreeze)
        if method == "fit":
            fitted = {"epochs": 2, "verbose": 0, "callbacks": [begins]}
            return model.fit(Shuffled(), **fitted).history
        if method == "evaluate":
            return [model.evaluate(X, X[:, :3], verbose=0) for _ in range(2)]
        return [model.train_on_batch(X, X[:, :3]) for _ in range(2)]

    found = assert_exact(make, act, kt.TowerStrategy(2), in_graph=True).returned
    first = found["smallest"][0] if method == "fit" else found[0][1]
    assert first > 0


def test_a_checkpoint_that_is_restored_before_the_model_is_built(tmp_path):
    """TensorFlow then restores not all weights, on one device, too."""
    make = seeded(m.Lazy, loss=keras.losses.MeanSquaredError)

    def act(model):
        return fit(model, x=X, y=X[:, :3], batch_size=8)

    trained = make()
    act(trained)
    path = tf.train.Checkpoint(model=trained).save(tmp_path / "saved")

    def restored():
        model = make()
        tf.train.Checkpoint(model=model).restore(path)
        return model

    assert_exact(restored, act, kt.TowerStrategy(2), in_graph=True)


class DrawsLate(keras.Sequential):
    """Draws for the first time in its step, with a seed and without."""

    def train_step(self, data):
        x, y, *_ = data
        noise = keras.random.normal(tf.shape(x))
        return super().train_step((x + 0.1 * noise, y))


def test_a_first_draw_in_the_step():
    def build():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        layers = m.Always(0.4), keras.layers.Dense(3)
        return DrawsLate([keras.Input((6,)), *layers])

    make = m.compiled(build, jit_compile=False)
    assert_exact(make, fit, kt.TowerStrategy(3), tolerance=4e-6)


class Lazy(keras.Model):
    """Builds a layer, and then fails."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.compile("sgd", "mse")

    def call(self, inputs):
        raise KeyError(f"no {self.dense(inputs).shape[-1]}")


def test_the_error_of_a_model_that_cannot_be_built():
    errors = []
    for block in (contextlib.nullcontext(), kt.AsyncTowerStrategy(2)):
        with pytest.raises(KeyError, match="no 3") as error, block:
            Lazy().fit(X, X[:, :3], verbose=0)
        errors.append(str(error.value).splitlines()[-1])
    alone, towers = errors
    assert towers == alone
