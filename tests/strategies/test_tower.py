"""What a TowerStrategy says of itself, and what it does with one tower."""

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import compat
from keras_towers.fit.weights.variables import TowerVariable
from tests.exactness import models as m
from tests.kit.compare import assert_exact, same_model
from tests.kit.training import compiled

pytestmark = pytest.mark.core


def test_describe():
    described = kt.TowerStrategy(4).describe()
    assert "TowerStrategy: 4 towers (/device:CPU:0 to /device:CPU:3)" in (
        described
    )
    assert "averaged over examples; weights are updated on tower 0" in described
    assert "the global batch is split over the towers" in described


def test_describe_other_options():
    described = kt.TowerStrategy(
        2, average=False, batches="each", updates="each"
    ).describe()
    assert "gradients are summed" in described
    assert "every tower updates its own weights" in described
    assert "every tower draws a whole batch" in described


def test_describe_one_tower():
    described = kt.TowerStrategy(["CPU:2"]).describe()
    assert "TowerStrategy: 1 tower (/device:CPU:2)" in described
    assert "one tower: nothing to reduce" in described


def test_defaults():
    strategy = kt.TowerStrategy()
    assert strategy.num_towers == strategy.num_replicas_in_sync == 8
    assert strategy.mode == "cpu"
    assert strategy.average and strategy.sync_every_epoch
    assert strategy.batches == "split"
    assert isinstance(strategy, tf.distribute.Strategy)


class Look(keras.callbacks.Callback):
    """What holds in the middle of ``fit``."""

    def on_train_begin(self, logs=None):
        self.strategy = tf.distribute.get_strategy()
        self.has_strategy = tf.distribute.has_strategy()

    def on_train_batch_end(self, batch, logs=None):
        self.kinds = {type(v._value) for v in self.model.variables}
        self.optimizer_kinds = {
            type(v._value) for v in self.model.optimizer.variables
        }
        self.values = [v._value for v in self.model.variables]


def test_one_tower_is_plain_keras():
    model = compiled()()
    before = [v._value for v in model.variables]
    look = Look()
    with kt.TowerStrategy(1):
        model.fit(m.FEATURES, m.LABELS, verbose=0, callbacks=[look])
    assert not look.has_strategy
    for kind in look.kinds | look.optimizer_kinds:
        assert issubclass(kind, tf.Variable)
        assert not issubclass(kind, compat.DistributedVariable)
    for value, was in zip(look.values, before, strict=True):
        assert value is was
    assert model._distribute_strategy is None


def test_one_tower_gives_what_keras_gives():
    def act(model):
        trained = model.fit(m.FEATURES, m.LABELS, verbose=0, epochs=2).history
        return trained, model.evaluate(m.FEATURES, m.LABELS, verbose=0)

    strategy = kt.TowerStrategy(1)
    assert_exact(compiled(), act, strategy, tolerance=0)


def test_one_tower_keeps_what_the_user_compiled():
    model = compiled(jit_compile=True)()
    with kt.TowerStrategy(1):
        model.fit(m.FEATURES[:16], m.LABELS[:16], verbose=0)
        assert model.jit_compile
    assert model.jit_compile


def test_several_towers_for_contrast():
    model = compiled()()
    before = [v._value for v in model.variables]
    look = Look()
    with kt.TowerStrategy(2) as strategy:
        model.fit(m.FEATURES, m.LABELS, verbose=0, callbacks=[look])
    assert look.strategy is strategy
    assert look.kinds == {TowerVariable}
    assert [v._value for v in model.variables] == before
    assert model._distribute_strategy is None


def test_a_strategy_can_be_used_again():
    strategy = kt.TowerStrategy(2)
    model = compiled()()
    for _ in range(2):
        with strategy:
            model.fit(m.FEATURES, m.LABELS, verbose=0, shuffle=False)
    other = compiled()()
    other.fit(m.FEATURES, m.LABELS, verbose=0, shuffle=False, epochs=2)
    same_model(model, other)


def test_towers_in_any_order():
    def act(model):
        return model.fit(m.FEATURES, m.LABELS, verbose=0)

    strategy = kt.TowerStrategy(["CPU:5", "CPU:1", "CPU:7"])
    assert_exact(compiled(), act, strategy)


def test_adopt_before_fit():
    model = compiled()()
    with kt.TowerStrategy(2) as strategy:
        strategy.adopt(model)
        assert all(isinstance(v._value, TowerVariable) for v in model.weights)
        model.fit(m.FEATURES, m.LABELS, verbose=0)
    assert all(
        not isinstance(v._value, compat.DistributedVariable)
        for v in model.weights
    )


def test_num_replicas_in_sync_inside_and_outside():
    seen = {}

    class Step(keras.Sequential):
        def train_step(self, data):
            context = tf.distribute.get_replica_context()
            index = context.replica_id_in_sync_group
            seen[int(tf.get_static_value(index))] = (
                context.num_replicas_in_sync,
                tf.distribute.get_strategy().num_replicas_in_sync,
            )
            return super().train_step(data)

    model = Step([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", m.cross_entropy())
    with kt.TowerStrategy(3) as strategy:
        assert strategy.num_replicas_in_sync == 3
        model.fit(m.FEATURES, m.LABELS, verbose=0)
        assert strategy.num_replicas_in_sync == 3
    # In a step the context tells the truth; the strategy averages by itself.
    assert seen == dict.fromkeys(range(3), (3, 1))


def test_several_towers_keep_it_too():
    model = compiled(jit_compile=True)()
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(model.jit_compile)
    )
    with kt.TowerStrategy(2):
        model.fit(m.FEATURES[:16], m.LABELS[:16], verbose=0, callbacks=[look])
    model.fit(m.FEATURES[:16], m.LABELS[:16], verbose=0, callbacks=[look])
    assert seen == [True, True]


@pytest.mark.parametrize("option", ["batches", "updates"])
@pytest.mark.parametrize("value", ["", "all", 1, True, ["each"]])
def test_bad_options(option, value):
    with pytest.raises(kt.TowerError) as error:
        kt.TowerStrategy(2, **{option: value})
    assert f"{option}={value!r}" in str(error.value)
    assert "'each'" in str(error.value)
