"""Towers that update in shares: as one device does, with 1/n of its slots."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import tower_variables
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import all_variables
from tests.fit.one_device import two_layers
from tests.fit.step.acts import Both
from tests.kit.compare import assert_all_close, assert_exact, assert_same_model
from tests.kit.training import X, adam, fit, linear

pytestmark = [pytest.mark.alternate, pytest.mark.usefixtures("small_shards")]

TOWERS = 4


def _partly_decayed():
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel:0$"])
    return optimizer


def _averaged():
    return adam(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)


@pytest.mark.core
@pytest.mark.parametrize(
    "cls, optimizer, updates",
    [
        (keras.Model, _partly_decayed, "sharded"),
        # Averages overwrite also the weights that a call is not for.
        (Both, _averaged, "sharded"),
        # Each tower's copies of those.
        (Both, _averaged, "each"),
        # The step itself builds it.
        (Both, adam, "sharded"),
    ],
)
def test_sparse_constrained_and_excluded_weights(cls, optimizer, updates):
    """Rows, a constraint, and what an optimizer does with some weights only."""

    def make():
        keras.utils.set_random_seed(1)
        inner = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(12, 4),
                keras.layers.Dense(5, kernel_constraint="max_norm"),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(3),
            ]
        )
        model = cls(inner.inputs, inner.outputs)
        model.compile(optimizer(), m.cross_entropy(), jit_compile=False)
        if optimizer is not adam:
            model.optimizer.build(model.trainable_variables)
        return model

    strategy = kt.TowerStrategy(2, updates=updates)
    assert_exact(make, lambda model: fit(model, x=m.TOKENS[:53]), strategy)


def even(optimizer):
    """A model of four equal weights."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((8,))]
        + [keras.layers.Dense(8, use_bias=False) for _ in range(TOWERS)]
    )
    model.compile(optimizer, "mse")
    return model


def train(model):
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0)


def bytes_by_tower(model):
    """The bytes of the slots on each tower."""
    found = [0] * TOWERS
    for slot in model.optimizer.variables[2:]:
        for tower, (shard,) in enumerate(slot._value.shards):
            found[tower] += shard.numpy().nbytes
    return found


def _size(variable):
    """The number of elements that a ``tf.Variable`` has in memory."""
    return tf.size(
        tf.raw_ops.ReadVariableOp(
            resource=variable.handle, dtype=variable.dtype
        )
    ).numpy()


@pytest.mark.parametrize("built", ["before", "inside"])
def test_each_tower_holds_its_part_of_the_slots(built):
    model = even("adam")
    if built == "before":
        train(model)
        for layer in model.layers:
            # Weights with equal paths stay distinct.
            layer.kernel._path = "kernel"
    held = [variable._value for variable in model.optimizer.variables]
    with kt.TowerStrategy(TOWERS, updates="sharded") as strategy:
        train(model)
        assert bytes_by_tower(model) == [8 * 8 * 4 * 2] * TOWERS
        # Nor is memory left where they were.
        assert not any(map(_size, held[2:]))
        said = f"{8 * 8 * 4 * 2:,} bytes on /device:CPU:3"
        assert said in strategy.describe()
    assert said in strategy.describe()
    for variable, before in zip(model.optimizer.variables, held, strict=False):
        assert variable._value is before and _size(before)


def test_in_turns_with_other_blocks_and_one_device():
    found, wanted = two_layers(), two_layers(run_eagerly=True)
    shares, weights = {"updates": "sharded"}, {"weights": "sharded"}
    for towers, options in (
        *((3, shares), (2, {"updates": "each"}), (2, weights)),
        *((2, {"updates": "each"}), (1, {"updates": "once"}), (2, shares)),
    ):
        with kt.TowerStrategy(towers, **options):
            fit(found)
    fit(found)
    fit(wanted, epochs=7)
    assert_same_model(found, wanted)


def test_momentum_in_a_loop_of_ones_own():
    """The operation that updates a whole weight takes whole slots only."""

    def train():
        model = linear()

        def replica(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) * y[:, None])
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)

        strategy = tf.distribute.get_strategy()
        step = tf.function(lambda batch: strategy.run(replica, args=batch))
        y = m.LABELS[:8].astype("float32")
        data = tf.data.Dataset.from_tensor_slices((X[:8], y)).batch(4)
        for batch in strategy.experimental_distribute_dataset(data):
            step(batch)
        return model.get_weights()

    with kt.TowerStrategy(2, updates="sharded"):
        found = train()
    assert_all_close(found, train())


def test_one_tower_does_not_shard(caplog):
    with caplog.at_level(logging.WARNING, "keras_towers"):
        strategy = kt.TowerStrategy(1, updates="sharded")
    assert strategy.updates == "once"
    assert "sharded" in caplog.text


def test_running_out_of_memory_when_leaving_keeps_the_model_whole(monkeypatch):
    def no_room(variable, value):
        raise tf.errors.ResourceExhaustedError(None, None, "no room")

    model = two_layers()
    with (
        pytest.raises(tf.errors.ResourceExhaustedError),
        kt.TowerStrategy(2, updates="sharded"),
    ):
        fit(model)
        state = [v.numpy() for v in all_variables(model)]
        monkeypatch.setattr(tower_variables, "overwrite", no_room)
    monkeypatch.undo()
    assert model._distribute_strategy is None
    assert_all_close(all_variables(model), state)
    fit(model)
