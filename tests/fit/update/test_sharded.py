"""Towers that update in shares: as one device does, with 1/n of its slots."""

import contextlib
import functools
import itertools
import logging
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import moved
from tests.exactness.contract import assert_contract
from tests.fit.one_device import two_layers
from tests.kit import seeded
from tests.kit.compare import (
    assert_exact,
    assert_towers_equal,
    close,
    same_model,
)
from tests.kit.long import long_but
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.ordinary import all_variables
from tests.kit.training import adam, fit

TOWERS = 4
# Where the rule of an update is what matters.
UPDATING = 2
OPTIONS = [
    {},
    {"clipnorm": 0.1},
    {"global_clipnorm": 0.1},
    {"clipvalue": 0.05},
    {"weight_decay": 0.1},
    {"gradient_accumulation_steps": 2},
    {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
    {"loss_scale_factor": 8.0, "global_clipnorm": 0.1},
]


def _partly_decayed():
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel:0$"])
    return optimizer


def _scaled(**options):
    inner = keras.optimizers.SGD(0.1, momentum=0.9, **options)
    return keras.optimizers.LossScaleOptimizer(inner, 4.0)


# Every optimizer with one option, and every option with some optimizer.
CASES = {
    f"{name}-{'-'.join(options)}": functools.partial(
        getattr(keras.optimizers, name), 0.05, **options
    )
    for name, options in zip(OPTIMIZERS, itertools.cycle(OPTIONS), strict=False)
}
CASES["for names"] = _partly_decayed
CASES["scaled"] = functools.partial(_scaled, **OPTIONS[6])
CASES["scaled-accumulated"] = functools.partial(_scaled, **OPTIONS[5])


def model_of(optimizer):
    """Weights of 24, 20, 15, 5 and 3 elements, one with a constraint."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(6, 4),
            keras.layers.Dense(
                5, kernel_constraint=keras.constraints.MaxNorm(0.5)
            ),
            keras.layers.Dense(3),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def gradients(model, step):
    """Gradients of all weights; that of the embedding has rows only."""
    draw = np.random.default_rng(step)
    first, *rest = (
        tf.constant(draw.normal(size=v.shape), "float32")
        for v in model.trainable_variables
    )
    optimizer = model.optimizer
    if not (
        optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor
    ):
        rows = tf.constant([5, 0, 2, 5])
        first = tf.IndexedSlices(tf.gather(first, rows), rows, first.shape)
    return [first, *rest]


def own_part(gradient):
    """What a tower contributes to a gradient."""
    index = tf.distribute.get_replica_context().replica_id_in_sync_group
    if isinstance(gradient, tf.IndexedSlices):
        here = slice(2 * index, 2 * index + 2)
        return tf.IndexedSlices(
            gradient.values[here], gradient.indices[here], gradient.dense_shape
        )
    # Exact, as their number is a power of two.
    return gradient / UPDATING


def applied(optimizer, strategy, calls):
    """Apply gradients, those of some weights in each call."""
    model = model_of(optimizer())
    weights = model.trainable_variables
    if len(calls) > 1:
        model.optimizer.build(weights)

    def apply(grads, some):
        if strategy is not None:
            grads = map(own_part, grads)
        model.optimizer.apply(list(grads), weights[some])

    with strategy or contextlib.nullcontext():
        if strategy is not None:
            strategy.adopt(model)
        for step, some in itertools.product(range(3), calls):
            grads = gradients(model, step)[some]
            if strategy is None:
                apply(grads, some)
            else:
                strategy.run(apply, (grads, some))
        assert_towers_equal(model)
    return model


OF_OPTIMIZERS = [*CASES][: len(OPTIMIZERS)]
# An option is shown once; other optimizers have them again. Muon keeps slots of
# several kinds.
AGAIN = {*OF_OPTIMIZERS[len(OPTIONS) :]} - {"Muon-clipnorm"}
DRAWN = random.Random(seeded.SEED).sample(sorted(AGAIN), 2)


@pytest.mark.core
@pytest.mark.parametrize(
    "name",
    long_but(
        lambda name: name not in AGAIN or name in DRAWN,
        [*CASES, "several calls"],
    ),
)
def test_every_optimizer_and_option(name):
    optimizer, calls = CASES.get(name), [slice(0, 5)]
    if optimizer is None:
        # Averages overwrite also the weights that a call is not for.
        optimizer = functools.partial(keras.optimizers.Adam, 0.05, **OPTIONS[6])
        calls = [slice(0, 2), slice(2, 5)]
    strategy = kt.TowerStrategy(UPDATING, updates="sharded")
    found = applied(optimizer, strategy, calls)
    same_model(found, applied(optimizer, None, calls), 1e-6)


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("embedding-clipped", {}, "its share of the weights"),
        ("embedding-clipped", {"mode": "collective"}, 'mode "collective"'),
        ("gan", {}, "its share of the weights"),
        ("loss-scale-overflow", {}, "its share of the weights"),
    ],
)
def test_contract(name, options, said):
    strategy = kt.TowerStrategy(2, updates="sharded", **options)
    assert_contract(name, strategy)
    assert said in strategy.describe()


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
        place = slot._value.device.rpartition(":")[2]
        found[int(place)] += slot.numpy().nbytes
    return found


def _size(variable):
    """The number of elements that a ``tf.Variable`` has in memory."""
    return tf.size(
        tf.raw_ops.ReadVariableOp(
            resource=variable.handle, dtype=variable.dtype
        )
    ).numpy()


@pytest.mark.parametrize(
    "optimizer, slots, built",
    [
        ("adam", 2, "before"),
        ("adafactor", 1.25, "inside"),
    ],
)
def test_each_tower_holds_its_part_of_the_slots(optimizer, slots, built):
    model = even(optimizer)
    if built == "before":
        train(model)
        for layer in model.layers:
            # Weights with equal paths are told apart.
            layer.kernel._path = "kernel"
    held = [variable._value for variable in model.optimizer.variables]
    with kt.TowerStrategy(TOWERS, updates="sharded") as strategy:
        train(model)
        assert bytes_by_tower(model) == [8 * 8 * 4 * slots] * TOWERS
        # Nor is memory left where they were.
        elsewhere = [v for v in held[2:] if _size(v) == 0]
        assert len(elsewhere) == 3 / 4 * len(held[2:])
        said = f"{int(8 * 8 * 4 * slots):,} bytes on /device:CPU:3"
        assert said in strategy.describe()
    assert said in strategy.describe()
    assert bytes_by_tower(model)[1:] == [0] * (TOWERS - 1)
    for variable, before in zip(model.optimizer.variables, held, strict=False):
        assert variable._value is before and _size(before)


def test_in_turns_with_other_blocks_and_one_device():
    found, wanted = two_layers(), two_layers(run_eagerly=True)
    for towers, updates in (3, "sharded"), (2, "each"), (1, "once"):
        with kt.TowerStrategy(towers, updates=updates):
            fit(found)
    with kt.TowerStrategy(2, updates="sharded"):
        fit(found)
    fit(wanted, epochs=4)
    same_model(found, wanted)


def test_frozen_and_unfrozen_layers():
    """A model that is compiled anew trains, and shares, other weights."""

    def act(model):
        first, second = model.layers[0], model.layers[-1]
        histories = []
        for frozen in (first, second):
            first.trainable = second.trainable = True
            frozen.trainable = False
            model.compile(adam(), model.loss, run_eagerly=model.run_eagerly)
            histories.append(fit(model))
        return histories

    strategy = kt.TowerStrategy(2, updates="sharded")
    assert_exact(two_layers, act, strategy)


def test_one_tower_has_nobody_to_share_with(caplog):
    with caplog.at_level(logging.WARNING, "keras_towers"):
        strategy = kt.TowerStrategy(1, updates="sharded")
    assert strategy.updates == "once"
    assert "sharded" in caplog.text


def test_slots_are_created_where_they_stay(monkeypatch):
    places = []
    place = moved.MovedVariables.place

    def noted(self, slot, device, home):
        places.append(slot._value.device == device)
        place(self, slot, device, home)

    monkeypatch.setattr(moved.MovedVariables, "place", noted)
    inner = keras.optimizers.Adam(0.01)
    model = two_layers(lambda: keras.optimizers.LossScaleOptimizer(inner))
    with kt.TowerStrategy(2, updates="sharded"):
        fit(model)
    assert len(places) >= 2 * len(model.trainable_variables) and all(places)


def test_what_has_no_room_on_the_way_back_leaves_nothing_half_done(
    monkeypatch,
):
    def no_room(variable, device):
        raise tf.errors.ResourceExhaustedError(None, None, "no room")

    model = two_layers()
    with (
        pytest.raises(tf.errors.ResourceExhaustedError),
        kt.TowerStrategy(2, updates="sharded"),
    ):
        fit(model)
        state = [v.numpy() for v in all_variables(model)]
        monkeypatch.setattr(moved.variables_lib, "moved", no_room)
    monkeypatch.undo()
    assert "scale_loss" not in vars(model.optimizer)
    assert "fit" not in vars(model)
    for now, before in zip(all_variables(model), state, strict=True):
        close(now.numpy(), before)
    fit(model)
