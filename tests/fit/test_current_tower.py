"""What code on towers can ask, and functions that people run on each."""

import keras
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_all_close, assert_close

pytestmark = pytest.mark.alternate

X, Y = m.FEATURES[:16], m.LABELS[:16]
ALONE = (0, 1, True, "/device:CPU:0", None)

# Which of a model's calls trains.
CALLS = {
    "fit": (lambda model: model.fit(X, Y, verbose=0), True),
    "train_on_batch": (lambda model: model.train_on_batch(X, Y), True),
    "evaluate": (lambda model: model.evaluate(X, Y, verbose=0), False),
    "test_on_batch": (lambda model: model.test_on_batch(X, Y), False),
    "predict": (lambda model: model.predict(X, verbose=0), False),
    "predict_on_batch": (lambda model: model.predict_on_batch(X), False),
}


def answer():
    tower = kt.current_tower()
    return tower.index, tower.total, tower.is_main, tower.device, tower.training


def on_towers(number, training):
    return {
        (index, number, index == 0, f"/device:CPU:{index}", training)
        for index in range(number)
    }


class Asking:
    """A model that asks in a layer, in its loss and in its step."""

    def __init__(self, eagerly=False):
        in_layer, in_loss, in_step = self.seen = [set(), set(), set()]

        class Layer(keras.layers.Layer):
            def call(self, x):
                in_layer.add(answer())
                return x

        class Model(keras.Sequential):
            def train_step(self, data):
                in_step.add(answer())
                return super().train_step(data)

        def loss(y, prediction):
            in_loss.add(answer())
            return m.cross_entropy()(y, prediction)

        self.model = Model([keras.Input((6,)), Layer(), keras.layers.Dense(3)])
        self.model.compile("sgd", loss, run_eagerly=eagerly)

    def answers(self, act):
        """What is said in the layer, the loss and the step of a call."""
        for seen in self.seen:
            seen.clear()
        act(self.model)
        # Keras's own runs of a layer, for its shapes, are on no tower.
        return [
            {one for one in seen if one[-1] is not None} for seen in self.seen
        ]


@pytest.mark.parametrize("towers", [1, 3])
def test_eager_calls_are_those_of_one_device(towers):
    asking = Asking(eagerly=True)
    with kt.TowerStrategy(towers):
        for name, (act, training) in CALLS.items():
            # Steps that run eagerly run as on one device.
            wanted = {(*ALONE[:-1], training)}
            in_layer, in_loss, in_step = asking.answers(act)
            assert in_layer == wanted, name
            assert in_loss == (set() if "predict" in name else wanted), name
            assert in_step == (wanted if training else set()), name


@pytest.mark.parametrize("towers", [1, 2])
def test_traced_steps_are_those_of_one_device(towers):
    in_callback = set()
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: in_callback.add(answer())
    )
    asking = Asking()
    with kt.TowerStrategy(towers):
        in_layer, in_loss, in_step = asking.answers(
            lambda model: model.fit(
                X, Y, 32, 1, 0, [note], validation_data=(X, Y)
            )
        )
    # It is the step of one device that is traced.
    assert in_step == {(*ALONE[:-1], True)}
    assert in_layer == in_loss == in_step | {(*ALONE[:-1], False)}
    # A callback is on no tower; the only one is known to train all the same.
    assert in_callback == {(*ALONE[:-1], True if towers == 1 else None)}


@pytest.mark.parametrize(
    ("eagerly", "expected"),
    # Eager steps are those of one device.
    [(False, on_towers(2, True)), (True, {(*ALONE[:-1], True)})],
    ids=["traced", "eager"],
)
def test_asynchronous_towers_know_their_index(eagerly, expected):
    asking = Asking(eagerly)
    with kt.AsyncTowerStrategy(2):
        answers = asking.answers(lambda model: model.fit(X, Y, 4, 1, 0))
    assert answers == [expected] * 3


def test_outside_of_a_strategy_there_is_one_tower():
    asking = Asking(eagerly=True)
    asking.model.fit(X, Y, verbose=0)
    assert set.union(*asking.seen) == {ALONE}
    with kt.TowerStrategy(2):
        assert answer() == ALONE


@pytest.mark.parametrize(
    "make", [kt.TowerStrategy, tf.distribute.MirroredStrategy]
)
def test_replicas_of_a_custom_loop_know_their_index(make):
    devices = ["/device:CPU:4", "/device:CPU:2"]
    strategy, seen = make(devices), []

    def ask():
        seen.append(answer())
        return tf.constant(kt.current_tower().index)

    values = tf.function(lambda: strategy.run(ask))()
    assert seen == [
        (0, 2, True, devices[0], None),
        (1, 2, False, devices[1], None),
    ]
    # What it says decides what is traced.
    indices = strategy.experimental_local_results(values)
    assert [int(index) for index in indices] == [0, 1]


# ---- kt.run_on_each_tower ----------------------------------------------------


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
