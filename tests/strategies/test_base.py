"""What every strategy does: says what runs, is copied, refuses bad input."""

import copy
import pydoc
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.kit.compare import use_model
from tests.kit.training import compiled, fit, linear
from tests.strategies.before import Before

pytestmark = pytest.mark.alternate

X, Y = m.FEATURES, m.LABELS


@pytest.mark.core
def test_describe_says_what_runs_and_what_changes_results():
    described = kt.TowerStrategy().describe()
    assert described.startswith("TowerStrategy: 8 towers (/device:CPU:0 to")
    for part in ("those of one device;", "updated on tower 0", "is split"):
        assert part in described
    assert "changes results" not in described
    tower = kt.TowerStrategy(2, batch_norm="tower").describe()
    assert 'batch_norm="tower" changes results' in tower
    assert "not those of one device, as the lines below say;" in tower
    many = kt.TowerStrategy(2, micro_batches=100).describe()
    assert "in 100 parts, one after another; with fewer rows, some" in many
    other = kt.TowerStrategy(2, average=False, batches="each")
    for part in ("one device times 2", "every tower takes a whole batch"):
        assert part in other.describe()


@pytest.mark.core
@pytest.mark.parametrize("towers", [["CPU:2"], ["CPU:5", "CPU:1"]])
def test_one_tower_is_plain_keras(towers):
    strategy = kt.TowerStrategy(towers)
    alone = len(towers) == 1
    seen = []

    def act(model):
        def look(batch, logs):
            seen.append(tf.distribute.get_strategy() is strategy)

        watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        fit(model, callbacks=[watch])

    # It is an ordinary model, with the same variables, afterwards.
    use_model(linear, act, strategy)
    assert set(seen) == {not alone}


OURS = {
    *("adopt", "average", "batches", "describe", "first_tower"),
    *("is_chief", "local_rank", "local_size", "mode", "num_replicas"),
    *("num_towers", "rank", "size", "sync_every_epoch", "updates"),
    *("scale_gradient", "staleness"),
}


def test_public_names():
    cls, theirs = kt.AsyncTowerStrategy, dir(tf.distribute.MirroredStrategy)
    public = {n for n in dir(cls()) if not n.startswith("_")}
    assert public.difference(theirs) == OURS
    shown = pydoc.plain(pydoc.render_doc(cls))
    shown = shown.partition("Methods defined here:")[2]
    ours = shown.partition("inherited from tensorflow")[0]
    members = set(re.findall(r"^ \|  (\w+)(?=\(|$| =)", ours, re.MULTILINE))
    assert "describe" in members
    # Python adds the last one where somebody has asked for it.
    members -= public | set(theirs) | {"__annotations__"}
    assert members == {"__enter__", "__exit__"}


def test_a_class_is_not_entered():
    said = r"`with TowerStrategy\(\):`"
    with pytest.raises(kt.TowerError, match=said), kt.TowerStrategy:
        pass


def test_what_is_copied_shares_its_strategy():
    towers = kt.TowerStrategy(2)
    for options in ({"strategy": towers}, [towers]):
        (same,) = tf.nest.flatten(copy.deepcopy(options))
        assert same is towers
    with towers:
        assert copy.deepcopy(towers) is towers
        assert copy.copy(towers) is towers


# Each keeps weights in its own way.
@pytest.mark.parametrize(
    "strategy", [kt.ParameterServerTowerStrategy, kt.AsyncTowerStrategy]
)
def test_what_is_copied_inside_is_on_no_towers(strategy):
    model = linear()
    with strategy(2) as towers:
        towers.adopt(model)
        copies = copy.deepcopy(model.weights)
        other = copy.deepcopy(model)
        copy.deepcopy(model.optimizer)
    assert_ordinary(other, trains_on_towers=True)
    for variable in copies:
        assert isinstance(variable.value, tf.Variable)
        assert not isinstance(variable.value, tf.distribute.DistributedValues)
    for values in zip(
        copies, model.get_weights(), other.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(values[1:], [values[0]] * 2)


@pytest.fixture
def model():
    return compiled()()


@pytest.fixture
def before(model):
    return Before(model)


def train(model, x=X, y=Y):
    return model.fit(x, y, shuffle=False, verbose=0).history


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()


def test_one_strategy_at_a_time(model, before):
    towers, other = kt.TowerStrategy(2), kt.TowerStrategy(2)
    of_another_class = kt.ParameterServerTowerStrategy(2)
    with towers:
        towers.adopt(model)
        for act, message in (
            (towers.__enter__, "entered already: .* once at a time"),
            (other.__enter__, "of another TowerStrategy: leave"),
            (lambda: other.adopt(model), "on another TowerStrategy. A"),
            (of_another_class.__enter__, r"strategy \(TowerStrategy\): leave"),
        ):
            with pytest.raises(kt.TowerError, match=message):
                act()
        assert tf.distribute.get_strategy() is towers
        assert model._distribute_strategy is towers
    with mirrored(), pytest.raises(kt.TowerError, match="Mirrored.*leave"):
        other.__enter__()
    before.assert_still()


def test_a_layer_of_a_mirrored_strategy():
    # The model is nobody's, but a layer's variables are.
    with mirrored():
        layer = keras.layers.Dense(3)
        layer.build((None, 6))
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile("sgd", m.cross_entropy())
    value = layer.kernel._value
    message = f"{layer.kernel.path}.*another strategy"
    with pytest.raises(kt.TowerError, match=message), kt.TowerStrategy(2):
        train(model)
    assert layer.kernel._value is value
    assert model._distribute_strategy is None


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_empty_data(model, before):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    nothing = dataset.filter(lambda *_: False)
    for data in ((X[:0], Y[:0]), (nothing,), (dataset.take(0),)):
        for batches, act in (("each", model.fit), ("split", model.evaluate)):
            strategy = kt.TowerStrategy(2, batches=batches)
            empty = "0 (examples|batches)|empty"
            with pytest.raises(ValueError, match=empty), strategy:
                act(*data, verbose=0)
            before.assert_still()


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_batches_than_towers(model, before, count):
    message = rf"fewer batches \({count}\) than .* towers \(4\): give more"
    strategy = kt.TowerStrategy(4, batches="each")
    with pytest.raises(kt.TowerError, match=message), strategy:
        model.fit(X[:count], Y[:count], batch_size=1, verbose=0)
    before.assert_still()


def with_heads(**options):
    """A model of two outputs, whose options may name another one."""
    heads = "a", "b"
    inputs = keras.Input((6,))
    outputs = {name: keras.layers.Dense(3, name=name)(inputs) for name in heads}
    model = keras.Model(inputs, outputs)
    losses = dict.fromkeys(heads, "mse")
    model.compile("sgd", **{"loss": losses, **options})
    return model


HEADS = dict.fromkeys(("a", "b"), X[:, :3])


@pytest.mark.parametrize(
    "make, x, y",
    [
        (m.mlp, X, Y),
        (compiled(), X[:, :4], Y),
        (compiled(), X, Y[:-1]),
        (compiled(), X, np.zeros((len(X), 5, 2), "float32")),
        (lambda: with_heads(metrics={"typo": ["mae"]}), X, HEADS),
        (lambda: with_heads(loss={"a": "mse", "typo": "mse"}), X, HEADS),
    ],
)
def test_the_error_is_that_of_keras(make, x, y):
    model = make()
    was = Before(model)
    with pytest.raises(Exception) as alone:
        train(make(), x, y)
    with pytest.raises(alone.type) as found, kt.TowerStrategy(2):
        train(model, x, y)
    assert found.type is alone.type
    if getattr(y, "ndim", 1) == 1:
        # Else Keras, which builds before it trains, complains of the metric.
        assert str(found.value)[:40] == str(alone.value)[:40]
    was.assert_still()


class StepOfKeras2:
    """Asks as a model of tf_keras does, which is not installed here."""

    def run_step(self, data):
        raise AssertionError

    run_step.__module__ = "tf_keras.src.engine.training"


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_model_of_keras_2_is_refused_in_one_line(in_graph):
    strategy = kt.TowerStrategy(2)
    data = tf.zeros([2, 3])

    def step():
        return strategy.run(StepOfKeras2().run_step, (data,))

    with (
        strategy.scope(),
        pytest.raises(kt.TowerError, match="^this is a model of tf_keras"),
    ):
        (tf.function(step) if in_graph else step)()
    with pytest.raises(kt.TowerError, match="adopt takes a keras.Model"):
        strategy.adopt(StepOfKeras2())


def test_a_dataset_without_batches(model, before):
    rows = tf.data.Dataset.from_tensor_slices((X, X[:, :1]))
    scalars = tf.data.Dataset.from_tensor_slices((X, X[:, 0]))
    with kt.TowerStrategy(2):
        with pytest.raises(ValueError, match="Expected shape"):
            train(model, rows, None)
        with pytest.raises(ValueError, match="incompatible") as error:
            train(model, scalars, None)
        assert ".batch(n)" in "".join(error.value.__notes__)
    before.assert_still()


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: kt.TowerStrategy(2, "sharded"),
            "TowerStrategy(towers=None, *",
        ),
        (lambda: kt.NoOpStrategy(lag=1), "'lag'. Its options are logs"),
        (lambda: kt.ModelParallelStrategy(), "required argument: 'layout_map'"),
        (lambda: kt.strategy("tower", 2, "sharded"), "too many positional"),
    ],
)
def test_arguments_that_no_constructor_has(make, said):
    with pytest.raises(kt.TowerError) as raised:
        make()
    assert said in str(raised.value)


def test_a_block_whose_end_fails_leaves_its_scope(monkeypatch):
    """As when the other ranks do something else at its end."""
    strategy, asked = kt.TowerStrategy(2), []

    def fails():
        raise kt.TowerError("the ranks do different things")

    release = strategy._adoption.release
    with pytest.raises(kt.TowerError, match="different things"), strategy:
        monkeypatch.setattr(strategy._config.transport, "size", 2)
        monkeypatch.setattr(strategy, "_end_together", fails)
        monkeypatch.setattr(
            strategy._adoption,
            "release",
            lambda asks_ranks: asked.append(asks_ranks),
        )
    assert not tf.distribute.has_strategy()
    assert asked == [False]
    monkeypatch.undo()
    release()
    with kt.TowerStrategy(2):
        assert tf.distribute.has_strategy()
