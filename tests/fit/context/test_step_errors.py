"""Users see the error that their own operation raises."""

import functools
import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import keras_patches
from keras_towers.fit.calls import tower_runner
from keras_towers.fit.context import step_errors
from keras_towers.foundation.errors import shorten
from tests.kit.compare import assert_all_close

pytestmark = pytest.mark.alternate

# Parts of one row would be broadcast.
ROWS, BAD = 12, 100.0
# None of them is what failed.
FOLLOWS = ("cancelled", "Collective ops", "rendezvous", "shut down")


def where(x, bad, good):
    return tf.where(x[:, 0] > 50, bad, good)


def label(x):
    labels = tf.cast(where(x, 7, 1), tf.int32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)


def assertion(x):
    check = tf.debugging.assert_less(x, 50.0, "too large")
    with tf.control_dependencies([check]):
        return tf.identity(x)


def numerics(x):
    return tf.debugging.check_numerics(where(x, np.inf, 1.0), "not finite")


def shapes(x):
    return tf.boolean_mask(x[:, 0], x[:, 0] < 50) + x[:, 1]


def python(x, function=tf.py_function):
    def run(values):
        if np.any(np.asarray(values) > 50):
            raise KeyError("an error of my own")
        return values

    result = function(run, [x], tf.float32)
    result.set_shape(x.shape)
    return result


def own_function(x):
    return tf.function(numerics)(x)


def compiled(x):
    return tf.function(lambda y: y * 2, jit_compile=True)(numerics(x))


def control_flow(x):
    return tf.map_fn(lambda row: numerics(row[None]), x)


KINDS = {
    label: "outside the valid range",
    assertion: "too large",
    numerics: "not finite",
    shapes: "Incompatible shapes",
    python: "an error of my own",
    functools.partial(python, function=tf.numpy_function): "of my own",
    own_function: "not finite",
    compiled: "not finite",
    control_flow: "not finite",
}
STRATEGIES = {
    "two": lambda: kt.TowerStrategy(2),
    "three": lambda: kt.TowerStrategy(3),
    "each": lambda: kt.TowerStrategy(2, updates="each"),
    "servers": lambda: kt.ParameterServerTowerStrategy(2),
    "async": lambda: kt.AsyncTowerStrategy(2),
    "rounds": lambda: kt.SyncReplicasStrategy(towers=2),
}
SYNCHRONOUS = ("two", "three", "each", "servers")


class Adds(keras.layers.Layer):
    """Adds nothing, in the forward or the backward pass."""

    def __init__(self, function, place):
        super().__init__()
        self.function, self.place = function, place

    def call(self, x):
        def nothing(values):
            return tf.reduce_sum(self.function(values)) * 0

        @tf.custom_gradient
        def same(values):
            return tf.identity(values), lambda up: up + nothing(x)

        return same(x) if self.place == "backward" else x + nothing(x)


def built(function, place):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, kernel_initializer="identity")]
    if place in ("forward", "backward"):
        layers.append(Adds(function, place))
    model = keras.Sequential(
        [keras.Input((4,)), *layers, keras.layers.Dense(4)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def rows(row):
    """Two batches, with a bad row in the second one."""
    x = np.random.RandomState(0).uniform(0, 1, (2 * ROWS, 4)).astype("f4")
    x[ROWS + row, 0] = BAD
    return x


def ran(model, method, x, **options):
    """The error that a method raises."""
    data = (x,) if method == "predict" else (x, x)
    if method == "fit":
        options["shuffle"] = False
    with pytest.raises(Exception) as caught:
        getattr(model, method)(*data, batch_size=ROWS, verbose=0, **options)
    return caught


@functools.cache
def one_device():
    """The weights that one device has after the first batch."""
    model = built(numerics, "forward")
    ran(model, "fit", rows(0))
    return [np.array(w) for w in model.get_weights()]


def assert_seen(caught, kind):
    assert caught.match(KINDS[kind])
    assert not any(word in str(caught.value) for word in FOLLOWS)


# Each kind once, each strategy, and both ends of a batch.
CASES = zip(KINDS, itertools.cycle(STRATEGIES), itertools.cycle((0, ROWS - 1)))


@pytest.mark.parametrize("kind,name,row", CASES)
def test_fit_raises_the_error_of_any_tower(kind, name, row):
    expected = one_device()
    model = built(kind, "forward")
    with STRATEGIES[name]():
        caught = ran(model, "fit", rows(row))
    assert_seen(caught, kind)
    if name in SYNCHRONOUS:
        assert_all_close(model.get_weights(), expected)


@pytest.mark.parametrize(
    "place,method",
    [("backward", "fit"), ("forward", "evaluate"), ("forward", "predict")],
)
def test_every_method_and_place_raises_it(place, method):
    model = built(label, place)
    with kt.TowerStrategy(2):
        assert_seen(ran(model, method, rows(ROWS - 1)), label)


def test_the_error_does_not_depend_on_timing():
    """Which tower stops first differs from time to time."""
    model, x = built(own_function, "forward"), rows(0)[ROWS:]
    with kt.TowerStrategy(3):
        for _ in range(40):
            with pytest.raises(tf.errors.InvalidArgumentError) as caught:
                model.test_on_batch(x, x)
            assert_seen(caught, own_function)
    assert any("3 towers" in note for note in caught.value.__notes__)


GOOD = rows(0)[:ROWS]


def generated():
    yield GOOD, GOOD
    yield GOOD, GOOD
    raise KeyError("an error of my own")


class Broken(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        if number == 2:
            raise KeyError("an error of my own")
        return GOOD, GOOD


def mapped():
    data = tf.data.Dataset.from_tensor_slices((rows(0), rows(0)))
    return data.batch(ROWS).map(lambda x, y: (x, python(y)))


@pytest.mark.parametrize("source", [generated, Broken, mapped])
def test_an_error_of_the_data_is_seen(source):
    model = built(None, "")
    with kt.TowerStrategy(2), pytest.raises(Exception) as caught:
        model.fit(source(), verbose=0)
    assert_seen(caught, python)
    # So other ranks hear of it.
    assert "an error of my own" in shorten(caught.value)


def lost_root_cause():
    payloads = {step_errors._DERIVED: b""}
    return tf.errors.CancelledError(None, None, "RecvAsync", payloads)


def not_about_rows():
    return tf.errors.UnknownError(None, None, "a rank has left")


@pytest.mark.parametrize(
    "made, wanted",
    [
        (lost_root_cause, ["on one device, outside of TowerStrategy"]),
        (not_about_rows, []),
    ],
)
def test_notes_explain_an_error_that_is_not_what_failed(made, wanted):
    error = made()
    config = kt.TowerStrategy(2)._config
    with (
        pytest.raises(type(error)) as caught,
        tower_runner.failing_together(config, "fit"),
    ):
        raise error
    notes = getattr(caught.value, "__notes__", [])
    assert all(text in note for text, note in zip(wanted, notes, strict=True))


def test_a_text_for_the_user_is_as_it_was_written():
    text = "pièce \"x['a']\" has {} rows"

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def step(rows):
        check = step_errors.assert_for_user(rows == 1, text, [rows])
        with tf.control_dependencies(check):
            return tf.identity(rows)

    assert step(tf.constant(1, tf.int64)) == 1
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(tf.constant(2, tf.int64))
    found = step_errors.error_for_user(caught.value)
    assert str(found) == text.format(2)
    assert step_errors.error_for_user(ValueError("of theirs")) is None


def test_calls_that_share_a_rendezvous_keep_their_tensors():
    """Calls of one function overlap, and the second sends first."""

    def wait(values, seconds):
        time.sleep(float(seconds))
        return values

    @tf.function(experimental_attributes={"_noinline": True})
    def function(x):
        with tf.device("CPU:1"):
            late = tf.where(x < 2, 0.3, 0.0)
            there = tf.numpy_function(wait, [x, late], tf.float32, False)
        with tf.device("CPU:0"):
            return x + there

    @tf.function
    def both(xs):
        def call(x):
            first = tf.where(x < 2, 0.0, 0.1)
            x = tf.numpy_function(wait, [x, first], tf.float32, False)
            return function(tf.ensure_shape(x, []))

        return tf.map_fn(call, xs, parallel_iterations=2)

    with kt.TowerStrategy(2):
        np.testing.assert_array_equal(both(tf.constant([1.0, 10.0])), [2, 20])


def test_a_function_on_one_device_shares_its_callers_rendezvous():
    variable = tf.Variable(1.0)

    def attribute(function):
        made = tf.function(function).get_concrete_function(tf.constant(1.0))
        return made.function_def.attr[keras_patches.SHARED].b

    def elsewhere(x):
        with tf.device("CPU:1"):
            return x + 1

    with kt.TowerStrategy(2):
        assert attribute(lambda x: x + 1)
        assert not attribute(lambda x: elsewhere(x) + 1)
        assert not attribute(lambda x: tf.function(elsewhere)(x) + 1)
        assert not attribute(lambda x: x + variable)
    assert not attribute(lambda x: x + 1)
