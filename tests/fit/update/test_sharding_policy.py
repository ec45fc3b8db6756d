"""Weights in shards: as one device trains, with 1/n of the bytes on a tower."""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.fit.weights import shards
from keras_towers.fit.weights.without_memory import is_deferred
from keras_towers.partition.timeline.gathers import gathered_bytes
from tests.kit.compare import assert_exact, assert_same, use_model
from tests.kit.sampling import sample_of
from tests.kit.training import (
    STEPS,
    OwnSlots,
    Y,
    adam,
    classifier,
    fit,
    linear,
    seeded,
    stacked,
)

pytestmark = [pytest.mark.alternate, pytest.mark.usefixtures("small_shards")]

layers = keras.layers


def sharded(towers=2, **options):
    return kt.TowerStrategy(towers, weights="sharded", **options)


def _held(strategy):
    """The bytes on each tower of weights and of the optimizer's state."""
    lines = strategy.describe().splitlines()
    found = [line for line in lines if " bytes on " in line]
    return [
        [
            int(n.replace(",", ""))
            for n in re.findall(r"([\d,]+) bytes on", line)
        ]
        for line in found
    ]


def _layout_of(variable):
    return getattr(variable._value, "layout", None)


def _mlp():
    # 37 rows on 2 and on 3 towers are not the same number on each.
    return [
        layers.Dense(37, activation="relu", kernel_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dense(37, use_bias=False, kernel_constraint="max_norm"),
        layers.Dense(3),
    ]


@pytest.mark.core
@pytest.mark.parametrize("towers", sample_of([2, 3]))
def test_a_tower_has_its_part_of_the_bytes(towers):
    make = stacked(_mlp, optimizer=adam)
    strategy = sharded(towers)
    found = assert_exact(make, lambda model: fit(model, epochs=2), strategy)
    total = sum(w.size * 4 for w in found.model.get_weights() if w.ndim == 2)
    weights, slots = _held(strategy)
    largest_row = 4 * 37
    assert len(weights) == len(slots) == towers
    for of_weights, of_slots in zip(weights, slots, strict=True):
        # Vectors are divided, too, and are no more than a row each.
        assert of_weights <= total / towers + 6 * largest_row
        assert of_slots <= 2 * (total / towers + 6 * largest_row)


def test_kernels_of_convolutions_are_gathered_not_images():
    def convolutions():
        return [
            layers.Conv2D(8, 1, activation="relu"),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]

    x = np.random.default_rng(0).normal(size=(14, 6, 6, 4))
    make, strategy = stacked(convolutions, (6, 6, 4)), sharded()
    assert_exact(make, lambda m: fit(m, x=x, y=Y[:14]), strategy)
    assert "computed once" not in strategy.describe()


def _deep():
    return [layers.Dense(32, activation="tanh") for _ in range(8)]


@pytest.mark.parametrize("jit_compile", sample_of([False, True]))
def test_no_more_is_gathered_than_the_budget(jit_compile, timelines):
    kernel = 4 * 32 * 32
    make = stacked(
        _deep,
        (32,),
        jit_compile=jit_compile,
        loss=keras.losses.MeanSquaredError,
    )
    x = np.random.default_rng(1).normal(size=(16, 32)).astype("float32")

    def train(model):
        return fit(model, x=x, y=x)

    wanted = use_model(make, train, in_graph=False)
    budgets = (0, "34816B", 100 * kernel)
    most, exchanges = [], []
    for budget in budgets:
        timelines.clear()
        strategy = sharded(2, gather_bytes=budget, updates="each")
        assert_same(use_model(make, train, strategy), wanted)
        (timeline,) = timelines
        most.append(max(gathered_bytes(timeline)))
        kinds = [exchange.kind for exchange in timeline.program.exchanges]
        exchanges.append(kinds.count("gather"))
    # One at a time, and the next one.
    assert most[0] <= 2 * (kernel + 4 * 32)
    # Of eight kernels and their vectors.
    assert 4 * kernel < most[1] <= 34816 == 8.5 * kernel
    assert most[2] == 8 * (kernel + 4 * 32)
    # Those of the backward pass once more.
    assert exchanges[0] > exchanges[1] > exchanges[2] == 16
    assert "of gathered weights at a time" in strategy.describe()


class Memory(keras.Model):
    """Writes weights of its own in ways that have no rule of their own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(6)
        self.head = layers.Dense(3)
        self.bank = self.add_weight(
            shape=(8, 6), trainable=False, name="bank", initializer="ones"
        )
        self.rows = self.add_weight(
            shape=(8, 6), trainable=False, name="rows", initializer="zeros"
        )

    def call(self, x):
        found = self.dense(x)
        mean = tf.reduce_mean(found, 0)
        self.bank.value[2:4].assign(tf.stack([mean, mean * 2.0]))
        self.rows.value.scatter_nd_add([[1], [7]], tf.stack([mean, mean]))
        self.rows.value.scatter_update(tf.IndexedSlices([mean], [3]))
        near = tf.gather_nd(self.bank.value, [[2], [0]])
        return self.head(found) + tf.reduce_sum(near) + self.rows[3, 0]


def test_operations_without_a_rule_get_whole_variables():
    def build():
        model = Memory()
        model.build((None, 6))
        return model

    assert_exact(seeded(build), fit, sharded(3))


_IN_BRANCHES = {
    "accumulated": lambda: keras.optimizers.SGD(
        0.1, gradient_accumulation_steps=2
    ),
    "with momentum": lambda: keras.optimizers.SGD(
        0.1, 0.9, gradient_accumulation_steps=2
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, 0.9), initial_scale=8.0
    ),
}


@pytest.mark.parametrize("name", _IN_BRANCHES)
def test_a_branch_of_sgd_is_divided_beside_whole_weights(name):
    """Four towers have no rows each of the last layer's three biases."""
    make = functools.partial(linear, optimizer=_IN_BRANCHES[name])
    strategy = sharded(4)
    assert_exact(make, fit, strategy)
    assert "computed once" not in strategy.describe()


# ---- where variables are -----------------------------------------------------


def test_functions_of_a_loaded_model_find_their_weights(tmp_path):
    """They have the handles of weights that were loaded with them."""
    saved = keras.Sequential([keras.Input((6,)), keras.layers.Dense(256)])
    saved.export(tmp_path, verbose=False)

    def layers():
        loaded = keras.layers.TFSMLayer(tmp_path, call_endpoint="serve")
        return [loaded, keras.layers.Dense(3)]

    # Keras makes no slots of weights with such names.
    make = stacked(layers, optimizer=lambda: keras.optimizers.SGD(0.05))
    strategy = kt.TowerStrategy(2, weights="sharded")
    assert_exact(make, fit, strategy, in_graph=True)


@pytest.mark.parametrize("optimizer", [adam, lambda: OwnSlots(0.01)])
def test_slots_take_no_memory_before_they_are_divided(monkeypatch, optimizer):
    begun = []
    place = WeightUpdate._place_slot

    def record(update, slot, weight):
        is_constant = "slow" not in slot.name
        begun.append(is_deferred(slot) or _layout_of(slot) or not is_constant)
        return place(update, slot, weight)

    monkeypatch.setattr(WeightUpdate, "_place_slot", record)
    make = stacked(_mlp, optimizer=optimizer)
    assert_exact(make, lambda model: [fit(model), fit(model)], sharded())
    assert begun and all(begun)


def test_a_weight_of_the_block_is_divided_before_the_next_is_made():
    with sharded():
        first = keras.Variable(tf.ones([4, 2]))
        assert _layout_of(first)
        model = classifier()
        assert all(map(_layout_of, model.trainable_variables))
        whole = model.get_weights()
        fit(model)
    assert not any(map(_layout_of, model.variables))
    assert not np.allclose(whole[0], model.get_weights()[0])


def test_weights_are_whole_after_an_error():
    model = classifier()
    before = model.get_weights()
    weights = model.trainable_variables
    values = [w._value for w in weights]
    with pytest.raises(ZeroDivisionError), sharded():
        fit(model)
        assert all(map(_layout_of, weights))
        1 / 0  # noqa: B018
    assert [w._value for w in weights] == values
    assert not np.allclose(before[0], model.get_weights()[0])
    assert fit(model)["loss"]
    assert model.optimizer.iterations.numpy() == 2 * STEPS


class TwoOptimizers(keras.Model):
    """The first layer has an optimizer of its own."""

    def compile(self, *args, **options):
        super().compile(*args, **options)
        self.first = keras.optimizers.SGD(0.1, momentum=0.9, name="first")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.first.apply(gradients[:2], weights[:2])
        self.optimizer.apply(gradients[2:], weights[2:])
        return {"loss": loss}


def test_an_optimizer_that_divides_nothing_is_named(caplog, monkeypatch):
    monkeypatch.setattr(shards, "SMALLEST_BYTES", 2**10)
    x = keras.Input((64,))
    model = TwoOptimizers(x, keras.layers.Dense(1)(keras.layers.Dense(64)(x)))
    model.compile(keras.optimizers.Adam(name="second"), "mse")
    with caplog.at_level("INFO"), sharded(3) as strategy:
        for _ in range(2):
            model.fit(np.ones((6, 64)), np.ones((6, 1)), verbose=0)
        assert _layout_of(model.layers[1].kernel)
    assert "its shards of those from 64 KiB" in strategy.describe()
    (said,) = [r.message for r in caplog.records if "divides" in r.message]
    assert said.startswith(
        'weights="sharded" divides none of the 2 weights that optimizer '
        "'second' updates"
    )


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_an_index_that_a_table_does_not_have_is_refused_as_on_one_device(
    method,
):
    """With the bounds of the table, which no tower has as a whole."""
    x = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(99, 8)(x)
    model = keras.Model(x, keras.layers.Dense(1)(table))
    model.compile("sgd", "mse", jit_compile=False)
    indices = np.arange(12).reshape(6, 2)
    indices[4, 1] = 99
    call = functools.partial(getattr(model, method), indices, verbose=0)
    if method == "fit":
        call = functools.partial(call, np.ones((6, 2, 1)), shuffle=False)
    said = []
    for place in contextlib.nullcontext(), sharded(3):
        with place, pytest.raises(tf.errors.InvalidArgumentError) as error:
            call()
        assert not hasattr(error.value, "__notes__")
        said += re.findall(r"indices.*|node.*GatherV2\S*}}", str(error.value))
    assert said[:2] == said[2:]
    assert said[0].endswith("indices[4,1] = 99 is not in [0, 99)")
