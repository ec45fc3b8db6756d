"""Variables exist once, or with a copy on each tower where that is needed."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights.tower_variables import TowerVariables
from keras_towers.foundation import compat
from keras_towers.transport.devices import short_name
from tests.kit.compare import assert_all_close, assert_towers_equal
from tests.kit.sampling import sample_of
from tests.kit.training import adam, fit, linear

pytestmark = pytest.mark.core


@pytest.mark.skipif(compat.KERAS < (3, 10), reason="this Keras has none")
def test_a_variable_made_in_the_block_is_merged_into_one():
    strategy = kt.TowerStrategy(3)
    options = {"aggregation": "mean", "synchronization": "on_read"}
    with strategy:
        variable = keras.Variable(0.0, trainable=False, **options)
        assert isinstance(variable._value, compat.DistributedVariable)
        for number, part in enumerate(variable._value.values, 1):
            part.assign(3.0 * number)
        assert TowerVariables(strategy._config, False).hold_once(variable)
        assert not isinstance(variable._value, compat.DistributedVariable)
    assert variable.numpy() == 6


def test_without_the_other_ranks_a_sum_is_that_of_this_process():
    strategy = kt.TowerStrategy(2)
    with strategy.scope():
        total = keras.metrics.Sum().total
    for number, part in enumerate(total._value.values, 3):
        part.assign(float(number))
    variables = TowerVariables(strategy._config, False)
    variables.restore(total, asks_ranks=False)
    assert total.numpy() == 3 + 4


@pytest.mark.parametrize("mirrors", [False, True])
def test_weights_made_in_the_block_are_ordinary_outside_of_replicas(mirrors):
    with kt.TowerStrategy(2, updates="each" if mirrors else "once"):
        weight = keras.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight.value**2)
        (gradient,) = tape.gradient(loss, [weight])
        held = weight._value
        assert isinstance(held, compat.DistributedVariable) == mirrors
    assert gradient.numpy().tolist() == [2, 4]
    assert not isinstance(weight._value, compat.DistributedVariable)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(3.0).learning_rate,
        lambda: keras.metrics.Sum(dtype="int32").total,
    ],
)
def test_a_scalar_made_in_the_block_is_a_number(make):
    with kt.TowerStrategy(2):
        variable = make().value
        # Of a metric, TensorFlow would give each tower half of it, rounded.
        variable.assign(3)
        for found in (np.asarray(variable), variable.numpy()):
            assert found == 3 and np.shape(found) == ()
            assert found.dtype == variable.dtype.as_numpy_dtype
        assert int(variable) == float(variable) == complex(variable) == 3


def test_copies_are_reduced_to_whatever_their_value_is():
    strategy = kt.TowerStrategy(2, updates="each")
    extended, total = strategy.extended, tf.distribute.ReduceOp.SUM
    with strategy:
        variable = keras.Variable(0.0).value
        ones = strategy.run(lambda: tf.ones([]))
        reduced = [
            extended.reduce_to(total, ones, variable),
            *extended.batch_reduce_to(total, [(ones, variable)]),
            extended.broadcast_to(tf.constant(2.0), variable),
        ]
    for found in reduced:
        assert [part.numpy() for part in found.values] == [2, 2]


class Counting(keras.Model):
    """Counts its batches by a variable that no attribute has."""

    def __init__(self, count):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.counted = lambda: count.assign_add(1.0)

    def call(self, x):
        return self.dense(x) * self.counted()


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_towers_write_their_copies_of_what_a_function_has_made(method):
    """TensorFlow makes variables of another class in functions."""
    x, y = np.ones((6, 3), "float32"), np.ones((6, 2), "float32")
    made = []

    @tf.function
    def count_from_zero():
        made[:] = made or [tf.Variable(0.0)]
        return made[0].read_value()

    with kt.TowerStrategy(3, updates="each"):
        count_from_zero()
        model = Counting(*made)
        model.compile("sgd", "mse", jit_compile=False)

        def check(*_, **__):
            assert_towers_equal(model)
            assert {copy.numpy() for copy in made[0].values} == {1.0}

        if method == "fit":
            checks = keras.callbacks.LambdaCallback(on_train_batch_end=check)
            model.fit(x, y, verbose=0, callbacks=[checks])
        else:
            model.train_on_batch(x, y)
        check()


@pytest.mark.parametrize(
    "make",
    sample_of(
        [
            keras.optimizers.Nadam,
            keras.optimizers.Adafactor,
            lambda: keras.optimizers.LossScaleOptimizer(adam()),
        ],
        3,
    ),
)
def test_slots_are_named_after_their_optimizer(make):
    paths = []
    for strategy in (None, kt.TowerStrategy(2, updates="each")):
        keras.backend.clear_session()
        model = linear(optimizer=make, run_eagerly=strategy is None)
        with strategy or contextlib.nullcontext():
            fit(model)
        paths.append([variable.path for variable in model.optimizer.variables])
    assert paths[0] == paths[1]


@pytest.mark.parametrize(
    ("towers", "device"), [(4, "CPU:3"), (["CPU:2", "CPU:1"], "CPU:0")]
)
def test_every_tower_has_a_copy_wherever_a_model_was_built(towers, device):
    found = []
    for strategy in (None, kt.TowerStrategy(towers, updates="each")):
        with tf.device(device):
            model = linear(optimizer=adam, run_eagerly=strategy is None)
        own, kernel = model.layers[-1].kernel.value, model.layers[-1].kernel
        with strategy or contextlib.nullcontext():
            fit(model)
            if strategy is not None:
                copies, described = kernel.value.values, strategy.describe()
        assert kernel.value is own and device in own.device
        found.append(model.get_weights())
    assert_all_close(*found)
    names = [short_name(copy.device) for copy in copies]
    assert names == [*map(short_name, strategy._config.devices)]
    of_each = ", ".join(f"84 bytes on {name}" for name in names)
    assert f"weights: {of_each}\n" in described
    assert any(copy is own for copy in copies) == (towers == 4)
