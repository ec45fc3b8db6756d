"""Functions that people run on every tower by themselves."""

import keras
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_all_close, assert_close


def index():
    return kt.current_tower().index


def by_tower(strategy, factor):
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(factor * context.replica_id_in_sync_group)
    )


@pytest.mark.parametrize("traced", [False, True])
def test_one_result_for_each_tower(traced):
    def fn(value, *, factor, fn=1.0):
        while value < 3:  # Is traced where it is.
            value = value + 1.0
        return {"index": tf.constant(index()), "value": value * factor + fn}

    strategy = kt.TowerStrategy(3)

    def step():
        factor = by_tower(strategy, 10.0)
        return kt.run_on_each_tower(fn, tf.constant(1.0), factor=factor, fn=2.0)

    with strategy.scope():
        results = (tf.function(step) if traced else step)()
    assert [int(result["index"]) for result in results] == [0, 1, 2]
    assert [float(result["value"]) for result in results] == [2, 32, 62]


def test_one_tower_gives_one_result():
    for strategy in (
        kt.TowerStrategy(1),
        tf.distribute.MirroredStrategy(["/device:CPU:3"]),
        tf.distribute.get_strategy(),
    ):
        with strategy.scope():
            assert kt.run_on_each_tower(lambda x: x + 1, 1) == [2]


def test_a_training_loop_gives_the_weights_of_one_device(monkeypatch):
    strategy = kt.TowerStrategy(2)
    with strategy.scope():
        model = m.mlp()
        optimizer = m.momentum()
    loss, batch = m.cross_entropy(), by_tower(strategy, 8)

    def tower(begin):
        x = tf.constant(m.FEATURES)[begin : begin + 8]
        y = tf.constant(m.LABELS)[begin : begin + 8]
        with tf.GradientTape() as tape:
            # Keras divides a loss by the number of towers here.
            value = loss(y, model(x, training=True))
        weights = model.trainable_variables
        pairs = list(zip(tape.gradient(value, weights), weights, strict=True))
        optimizer.apply_gradients(pairs)
        # It can be read only once.
        return value, zip(*zip(*pairs, strict=True), strict=True)

    def step():
        losses, pairs = zip(*kt.run_on_each_tower(tower, batch), strict=True)
        assert [len(list(both)) for both in pairs] == [len(model.weights)] * 2
        return losses

    rewritten = []
    convert = api._convert_actual

    def noted(function, *arguments):
        rewritten.append(function.__module__)
        return convert(function, *arguments)

    monkeypatch.setattr(api, "_convert_actual", noted)
    with strategy.scope():
        losses = tf.function(step)()
    assert len(losses) == 2
    # AutoGraph leaves the package as it is, which would take it seconds.
    assert set(rewritten) == {__name__}
    alone = m.mlp()
    alone.compile(m.momentum(), loss, run_eagerly=True)
    wanted = alone.train_on_batch(m.FEATURES[:16], m.LABELS[:16])
    assert_close(float(sum(losses)), float(wanted), 1e-5)
    assert_all_close(model.weights, alone.weights, 1e-5)


def test_what_the_first_tower_creates_is_for_all():
    layer = keras.layers.Dense(2)

    def fn():
        new = keras.layers.Dense(3)(tf.ones((1, 2)))
        return tf.Variable(tf.ones(2), name="a"), new

    with kt.TowerStrategy(3).scope():
        results = kt.run_on_each_tower(lambda: layer(tf.ones((1, 3))))
        variables, news = zip(*kt.run_on_each_tower(fn), strict=True)
    assert len(layer.weights) == 2
    assert len({id(variable) for variable in variables}) == 1
    for first, *others in (results, news):
        for other in others:
            assert_close(first, other, 0)


def made(name="extra", initial_value=(1.0, 2.0), dtype="float32"):
    return lambda: tf.Variable(initial_value, name=name, dtype=dtype)


def head(units):
    return lambda: keras.layers.Dense(units, name="head")(tf.ones((1, 3)))


def refused(fn, traced):
    """What is said of a function that towers refuse."""

    def step():
        kt.run_on_each_tower(fn)

    with pytest.raises(kt.TowerError) as error, kt.TowerStrategy(2).scope():
        (tf.function(step) if traced else step)()
    return str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "here", "there", "traced"),
    [
        (made(), made("odd"), "'odd' [2] float32", "'extra' [2]", True),
        (None, made(), "'extra' [2] float32", "creates nothing", False),
        (made(), None, "creates nothing", "'extra' [2] float32", True),
        (made(), made(dtype="float64"), "[2] float64", "[2] float32", False),
        (made(), made("extra", lambda: tf.ones((3, 1))), "[3, 1]", "[2]", True),
        (head(2), head(3), "'kernel' [3, 3]", "[3, 2]", False),
    ],
)
def test_towers_that_create_other_variables(first, second, here, there, traced):
    def fn():
        tf.Variable(name="common", initial_value=1.0)
        if act := (first, second)[index()]:
            act()

    said = refused(fn, traced)
    for part in ("tower 1", "tower 0", here, there):
        assert part in said
    assert "'common' []" not in said


@pytest.mark.parametrize(
    ("returned", "traced"),
    [
        (lambda pairs: (1.0, [p for p in pairs if p[0] is not None]), True),
        (lambda pairs: {"loss": 1.0, "gradients": tuple(pairs)}, False),
        (lambda pairs: (1.0, {"in": zip(*zip(*pairs))}), True),  # noqa: B905
    ],
    ids=["missing", "none", "zip inside"],
)
def test_towers_with_gradients_for_other_variables(returned, traced):
    with kt.TowerStrategy(2).scope():
        common, odd = (tf.Variable(1.0, name=name) for name in "ab")

    def fn():
        gradient = tf.zeros(()) if index() == 0 else None
        return returned([(tf.zeros(()), common), (gradient, odd)])

    said = refused(fn, traced)
    assert "tower 1" in said and "b:0" in said
    assert "a:0" not in said


def test_it_is_refused_on_a_tower():
    with pytest.raises(kt.TowerError, match="takes a function"):
        kt.run_on_each_tower(3)
    strategy = kt.TowerStrategy(2)
    with pytest.raises(kt.TowerError, match="was called on a tower"):
        strategy.run(lambda: kt.run_on_each_tower(index))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.train_step = lambda data: kt.run_on_each_tower(index)
    model.compile("sgd", m.cross_entropy())
    with pytest.raises(kt.TowerError, match="was called on a tower"), strategy:
        model.fit(m.FEATURES, m.LABELS, verbose=0)
