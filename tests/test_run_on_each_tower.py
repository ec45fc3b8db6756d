"""Functions that people run on every tower by themselves."""

from typing import Any, NamedTuple

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m

TOWERS = 3


def both_ways(strategy, fn, *args):
    """The results of an eager call; a traced one has to give the same."""
    with strategy.scope():
        eager = kt.run_on_each_tower(fn, *args)
        traced = tf.function(lambda: kt.run_on_each_tower(fn, *args))()
    tf.nest.assert_same_structure(eager, traced)
    for a, b in zip(
        tf.nest.flatten(eager), tf.nest.flatten(traced), strict=True
    ):
        tf.debugging.assert_near(tf.cast(a, tf.float32), tf.cast(b, tf.float32))
    return eager


def index():
    return kt.current_tower().index


def test_one_result_for_each_tower():
    def fn(value, factor):
        return {"index": tf.constant(index()), "product": value * factor}

    strategy = kt.TowerStrategy(TOWERS)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10.0 * context.replica_id_in_sync_group)
    )
    results = both_ways(strategy, fn, values, 2.0)
    assert [int(result["index"]) for result in results] == [0, 1, 2]
    assert [float(result["product"]) for result in results] == [0, 20, 40]


@pytest.mark.parametrize(
    "make",
    [
        lambda: kt.TowerStrategy(1),
        lambda: tf.distribute.MirroredStrategy(["/device:CPU:3"]),
        tf.distribute.get_strategy,
    ],
)
def test_one_tower(make):
    (result,) = both_ways(make(), lambda x: x + 1, tf.constant(1.0))
    assert float(result) == 2


def test_control_flow_is_traced():
    def fn(x):
        while tf.reduce_sum(x) < 10:
            x = x * 2.0
        return x

    strategy = kt.TowerStrategy(2)
    with strategy.scope():
        results = tf.function(lambda x: kt.run_on_each_tower(fn, x))(
            tf.constant(1.0)
        )
    assert [float(value) for value in results] == [16, 16]


def test_python_values_come_back_as_they_are():
    with kt.TowerStrategy(2).scope():
        assert kt.run_on_each_tower(lambda: (index(), "a", None)) == [
            (0, "a", None),
            (1, "a", None),
        ]


@pytest.mark.parametrize("traced", [False, True])
def test_a_training_loop(traced):
    strategy = kt.TowerStrategy(2)
    with strategy.scope():
        model = m.mlp()
        optimizer = m.momentum()
    alone = m.mlp()
    loss = m.cross_entropy()
    halves = [
        (m.FEATURES[:8], m.LABELS[:8]),
        (m.FEATURES[8:16], m.LABELS[8:16]),
    ]
    x, y = (
        strategy.experimental_distribute_values_from_function(
            lambda context, part=part: tf.constant(
                halves[context.replica_id_in_sync_group][part]
            )
        )
        for part in (0, 1)
    )

    def tower(x, y):
        with tf.GradientTape() as tape:
            # Keras divides a loss by the number of towers here.
            value = loss(y, model(x, training=True))
        weights = model.trainable_variables
        pairs = list(zip(tape.gradient(value, weights), weights, strict=True))
        optimizer.apply_gradients(pairs)
        return value, pairs

    def step():
        return [value for value, _ in kt.run_on_each_tower(tower, x, y)]

    with strategy.scope():
        losses = (tf.function(step) if traced else step)()
    assert len(losses) == 2
    alone.compile(m.momentum(), loss)
    wanted = alone.train_on_batch(m.FEATURES[:16], m.LABELS[:16])
    assert float(sum(losses)) == pytest.approx(float(wanted), rel=1e-5)
    for mine, other in zip(model.weights, alone.weights, strict=True):
        tf.debugging.assert_near(mine.value, other.value, 1e-5, 1e-5)


def test_layers_that_the_first_tower_builds():
    layer = keras.layers.Dense(2)
    with kt.TowerStrategy(2).scope():
        results = kt.run_on_each_tower(lambda: layer(tf.ones((1, 3))))
    assert len(layer.weights) == 2
    tf.debugging.assert_equal(*results)


def test_variables_of_every_tower():
    with kt.TowerStrategy(TOWERS).scope():
        made = kt.run_on_each_tower(
            lambda: (
                tf.Variable(tf.ones(2), name="a"),
                keras.layers.Dense(3)(tf.ones((1, 2))),
            )
        )
    assert len({id(variable) for variable, _ in made}) == 1


def new_variable(of_main, of_others):
    """A tower function that creates a variable, not the same everywhere."""

    def fn():
        arguments = of_main if index() == 0 else of_others
        if arguments is not None:
            return tf.Variable(name="common", initial_value=1.0), tf.Variable(
                **arguments
            )
        return tf.Variable(name="common", initial_value=1.0)

    return fn


MADE = {"name": "extra", "initial_value": [1.0, 2.0]}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("of_main", "of_others", "parts"),
    [
        (MADE, {**MADE, "name": "odd"}, ("'odd' [2] float32", "no such")),
        (None, MADE, ("'extra' [2] float32", "no such variable")),
        (MADE, None, ("creates nothing", "'extra' [2] float32")),
        (MADE, {**MADE, "initial_value": [1.0]}, ("[1] float32", "[2] float")),
        (MADE, {**MADE, "dtype": "float64"}, ("[2] float64", "[2] float32")),
        (
            MADE,
            {**MADE, "initial_value": lambda: tf.ones((3, 1))},
            ("[3, 1] float32", "[2] float32"),
        ),
    ],
)
def test_towers_that_create_other_variables(of_main, of_others, parts, traced):
    def step():
        kt.run_on_each_tower(new_variable(of_main, of_others))

    with (
        pytest.raises(kt.TowerError) as error,
        kt.TowerStrategy(2).scope(),
    ):
        (tf.function(step) if traced else step)()
    message = str(error.value)
    for part in ("tower 1", "tower 0", *parts):
        assert part in message
    assert "'common' []" not in message


def test_layers_of_other_sizes():
    def fn():
        return keras.layers.Dense(2 + index(), name="head")(tf.ones((1, 3)))

    with (
        pytest.raises(kt.TowerError, match=r"'kernel' \[3, 3\].*\[3, 2\]"),
        kt.TowerStrategy(2).scope(),
    ):
        kt.run_on_each_tower(fn)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "form", ["missing", "none", "dictionary", "zip", "zip inside"]
)
def test_towers_with_gradients_for_other_variables(form, traced):
    strategy = kt.TowerStrategy(2)
    with strategy.scope():
        model = m.mlp()
    odd, common = model.trainable_variables[1], model.trainable_variables[0]

    def fn():
        pairs = [(tf.zeros(v.shape), v) for v in model.trainable_variables]
        if index() == 1:
            if form in ("missing", "zip"):
                del pairs[1]
            else:
                pairs[1] = (None, odd)
        if form == "dictionary":
            return {"loss": 1.0, "gradients": tuple(pairs)}
        if form.startswith("zip"):
            zipped = zip(*zip(*pairs, strict=True), strict=True)
            return zipped if form == "zip" else (1.0, {"gradients": zipped})
        return 1.0, pairs

    def step():
        kt.run_on_each_tower(fn)

    with pytest.raises(kt.TowerError) as error, strategy.scope():
        (tf.function(step) if traced else step)()
    assert "tower 1" in str(error.value)
    assert odd.path in str(error.value)
    assert common.path not in str(error.value)


class Named(NamedTuple):
    """What a tower may return too."""

    pairs: Any


def test_zip_objects_come_back_as_lists():
    def fn():
        pairs = [(1.0, "a"), (2.0, "b")]
        zips = [zip([1.0, 2.0], "ab", strict=True) for _ in range(4)]
        found = zips[0], [zips[1]], {"in": zips[2]}, Named(zips[3])
        return found, (pairs, [pairs], {"in": pairs}, Named(pairs))

    with kt.TowerStrategy(2).scope():
        results = kt.run_on_each_tower(fn)
    assert len(results) == 2
    for found, wanted in results:
        assert found == wanted
        assert isinstance(found[3], Named)


def test_arguments_by_name():
    def fn(value, *, factor, fn=1.0):
        return value * factor + fn

    strategy = kt.TowerStrategy(2)
    factors = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10.0 * context.replica_id_in_sync_group)
    )
    with strategy.scope():
        results = kt.run_on_each_tower(
            fn, tf.constant(2.0), factor=factors, fn=3.0
        )
    assert [float(result) for result in results] == [3, 23]
    assert kt.run_on_each_tower(fn, 2.0, factor=4.0) == [9]


def test_errors_of_the_function_are_its_own():
    def fn():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), kt.TowerStrategy(2).scope():
        kt.run_on_each_tower(fn)


def test_on_a_tower_it_is_refused():
    strategy = kt.TowerStrategy(2)
    with pytest.raises(kt.TowerError, match="was called on a tower"):
        strategy.run(lambda: kt.run_on_each_tower(index))

    class Step(keras.Sequential):
        def train_step(self, data):
            return kt.run_on_each_tower(index)

    model = Step([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", m.cross_entropy())
    with pytest.raises(kt.TowerError, match="was called on a tower"), strategy:
        model.fit(m.FEATURES, m.LABELS, verbose=0)


def test_no_function():
    with pytest.raises(kt.TowerError, match="takes a function"):
        kt.run_on_each_tower(3)
