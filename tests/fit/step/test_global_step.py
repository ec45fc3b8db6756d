"""A step of Keras on towers is traced once, as on one device."""

import functools

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import assert_exact
from tests.kit.graphs import assert_freed
from tests.kit.meshes import layout_map, mesh_of
from tests.kit.training import X, Y, fit, linear, stacked

pytestmark = pytest.mark.alternate


class Asking(keras.Sequential):
    """Asks while it is traced."""

    def __init__(self, layers):
        super().__init__(layers)
        self.asked = []

    def train_step(self, data):
        rows = data[0].shape[0]
        self.asked.append(
            (kt.current_tower(), rows, tf.distribute.get_strategy())
        )
        return super().train_step(data)


# A trace in which the optimizer makes its variables is repeated.
def test_it_is_traced_for_all_towers_at_once_without_a_strategy():
    model = linear(cls=Asking)
    with kt.TowerStrategy(4):
        fit(model, x=X[:48], y=Y[:48])
    _, (tower, _, strategy) = model.asked
    assert (tower.index, tower.total, tower.training) == (0, 1, True)
    assert strategy.num_replicas_in_sync == 1


def test_a_batch_of_a_fixed_size_is_traced_with_it():
    model = linear(cls=Asking)
    data = tf.data.Dataset.from_tensor_slices((X[:48], Y[:48]))
    with kt.TowerStrategy(4):
        model.fit(data.batch(12, drop_remainder=True), verbose=0)
    assert [rows for _, rows, _ in model.asked] == [12, 12]


@pytest.mark.filterwarnings("ignore:Even though the `tf.config")
@pytest.mark.parametrize(
    "cause", ["run_eagerly=True", "tf.config.run_functions_eagerly(True)"]
)
def test_eager_steps_run_as_on_one_device_and_warn_once(logged, cause):
    compiled = cause.startswith("run_eagerly")
    model = linear(cls=Asking, run_eagerly=compiled)
    tf.config.run_functions_eagerly(not compiled)
    try:
        with kt.TowerStrategy(2):
            fit(model, 2, x=X[:24], y=Y[:24], batch_size=12)
    finally:
        tf.config.run_functions_eagerly(False)
    assert [rows for _, rows, _ in model.asked] == [12] * 4
    ((level, said),) = logged("runs eagerly")
    assert level == "WARNING" and f"leave out {cause}" in said


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"updates": "sharded", "micro_batches": 2},
        {"weights": "sharded", "remat": True},
        {"jit_compile": True},
    ],
    ids=str,
)
def test_what_a_step_is_built_of_is_freed(options):
    compiles = options.pop("jit_compile", False)
    middle = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = linear(*middle, jit_compile=compiles)
    with kt.TowerStrategy(2, **options), assert_freed():
        fit(model)
        model.evaluate(X, Y, verbose=0)


def test_the_graph_of_a_column_is_freed():
    model = linear()
    layouts = layout_map(mesh_of(2, 2), {"dense.*kernel": ("model", None)})
    with kt.ModelParallelStrategy(layouts), assert_freed():
        fit(model)


class Generating(keras.Sequential):
    """Trains on rows of its own, whatever the data is."""

    def train_step(self, data):
        rows = tf.random.stateless_normal([5, 6], [data, 1])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(rows) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss, "data": data}


@pytest.mark.parametrize("updates", ["once", "each", "sharded"])
def test_data_without_rows(updates):
    def act(model):
        return model.fit(tf.data.Dataset.range(3), verbose=0)

    make = functools.partial(linear, cls=Generating)
    towers = kt.TowerStrategy(2, updates=updates)
    assert_exact(make, act, towers, in_graph=True)


class Asked(keras.layers.Layer):
    """A loop whose condition writes a variable, as its rounds may."""

    def __init__(self, rounds_write):
        super().__init__()
        self.rounds_write = rounds_write

    def build(self, shape):
        self.asked = tf.Variable(0.0, trainable=False)

    def call(self, x):
        def is_left(k, _):
            self.asked.assign_add(1.0)
            return k < 3

        def round_(k, y):
            if self.rounds_write:
                self.asked.assign_add(0.5)
            return k + 1, y + 0.01 * self.asked

        return tf.while_loop(is_left, round_, (0, x))[1]


@pytest.mark.parametrize("rounds_write", [False, True])
def test_conditions_that_write_variables(rounds_write):
    def act(model):
        return fit(model), float(model.layers[0].asked)

    make = stacked(lambda: [Asked(rounds_write), keras.layers.Dense(3)])
    assert_exact(make, act, kt.TowerStrategy(3, updates="each"))
