"""Towers that update in shares: as one device does, with 1/n of its slots."""

import contextlib
import itertools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import slots
from tests.exactness.cases import HARDEST
from tests.exactness.contract import assert_contract
from tests.kit.compare import (
    assert_exact,
    assert_towers_equal,
    close,
    same_model,
)
from tests.kit.long import long_but
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.ordinary import all_variables
from tests.kit.training import adam, classifier, fit

TOWERS = 4
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
    random = np.random.default_rng(step)
    first, *rest = (
        tf.constant(random.normal(size=v.shape), "float32")
        for v in model.trainable_variables
    )
    optimizer = model.optimizer
    if not (
        optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor
    ):
        rows = tf.constant([5, 0, 2, 5])
        first = tf.IndexedSlices(tf.gather(first, rows), rows, first.shape)
    return [first, *rest]


def on_towers(strategy, model, grads, weights):
    """Apply gradients to which every tower contributes."""

    def mine(grad):
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        if isinstance(grad, tf.IndexedSlices):
            here = slice(index, index + 1)
            return tf.IndexedSlices(
                grad.values[here], grad.indices[here], grad.dense_shape
            )
        # Exact, as their number is a power of two.
        return grad / TOWERS

    strategy.run(lambda: model.optimizer.apply(list(map(mine, grads)), weights))


def applied(optimizer, strategy=None):
    """Apply gradients, and return all variables of the model."""
    model = model_of(optimizer())
    weights = model.trainable_variables
    with strategy or contextlib.nullcontext():
        if strategy is not None:
            strategy.adopt(model)
        for step in range(3):
            grads = gradients(model, step)
            if strategy is None:
                model.optimizer.apply(grads, weights)
            else:
                on_towers(strategy, model, grads, weights)
    return [v.numpy() for v in all_variables(model)]


def assert_applied_alike(optimizer):
    strategy = kt.TowerStrategy(TOWERS, updates="sharded")
    found, wanted = applied(optimizer, strategy), applied(optimizer)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs, 1e-6)


@pytest.mark.parametrize(
    "name, turn",
    # Every optimizer with two options, and every option with some optimizers.
    long_but(
        lambda case: OPTIMIZERS.index(case[0]) % 4 == case[1],
        itertools.product(OPTIMIZERS, range(4)),
    ),
)
def test_every_optimizer(name, turn):
    cls = getattr(keras.optimizers, name)
    for options in OPTIONS[turn::4]:
        assert_applied_alike(lambda options=options: cls(0.05, **options))


@pytest.mark.core
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_every_option(options):
    sgd = keras.optimizers.SGD
    assert_applied_alike(lambda: sgd(0.1, momentum=0.9, **options))
    assert_applied_alike(
        lambda: keras.optimizers.LossScaleOptimizer(sgd(0.1, **options), 4.0)
    )


@pytest.mark.parametrize(
    "name",
    long_but(
        lambda name: name not in ("accumulation", "lazy"),
        (*HARDEST, "loss-scale-overflow", "eager", "lazy"),
    ),
)
def test_contract(name):
    assert_contract(name, kt.TowerStrategy(3, updates="sharded"))


@pytest.mark.parametrize("mode", ["gpu", "collective"])
def test_requested_all_reduce_is_used(mode):
    strategy = kt.TowerStrategy(2, mode=mode, updates="sharded")
    assert_contract("embedding-clipped", strategy)
    assert f'mode "{mode}"' in strategy.describe()


def even(optimizer="adam"):
    """A model of four equal weights."""
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((8,))]
        + [keras.layers.Dense(8, use_bias=False) for _ in range(TOWERS)]
    )
    model.compile(optimizer, "mse")
    return model


def train(model, epochs=1):
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    model.fit(x, x, batch_size=8, epochs=epochs, shuffle=False, verbose=0)


def bytes_by_tower(model):
    """The bytes of the slots on each tower."""
    found = [0] * TOWERS
    for slot in model.optimizer.variables[2:]:
        place = slot._value.device.rpartition(":")[2]
        found[int(place)] += slot.numpy().nbytes
    return found


@pytest.mark.parametrize("built", ["before", "inside"])
@pytest.mark.parametrize(
    "optimizer, slots", [("adam", 2), ("muon", 1), ("adafactor", 1.25)]
)
def test_each_tower_holds_its_part_of_the_slots(built, optimizer, slots):
    model = even(optimizer)
    if built == "before":
        train(model)
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


def _size(variable):
    """The number of elements that a ``tf.Variable`` has in memory."""
    return tf.size(
        tf.raw_ops.ReadVariableOp(
            resource=variable.handle, dtype=variable.dtype
        )
    ).numpy()


def test_slots_of_weights_with_equal_paths_are_told_apart():
    model = even()
    for layer in model.layers:
        layer.kernel._path = "kernel"
    with kt.TowerStrategy(TOWERS, updates="sharded"):
        train(model)
        assert len(set(bytes_by_tower(model))) == 1


def test_in_turns_with_other_blocks_and_one_device():
    found, wanted = classifier(optimizer=adam), classifier(optimizer=adam)
    with kt.TowerStrategy(3, updates="sharded"):
        fit(found)
        fit(found)
    with kt.TowerStrategy(2, updates="each"):
        fit(found)
    fit(found)
    with kt.TowerStrategy(2, updates="sharded"):
        fit(found)
    for _ in range(5):
        fit(wanted)
    same_model(found, wanted)


def test_several_calls_for_parts_of_the_weights():
    """Moving averages overwrite also the weights that a call is not for."""

    def twice(model, apply):
        weights = model.trainable_variables
        for step in range(3):
            grads = gradients(model, step)
            for some in (slice(0, 2), slice(2, 5)):
                apply(grads[some], weights[some])

    def make():
        model = model_of(keras.optimizers.Adam(0.05, **OPTIONS[6]))
        model.optimizer.build(model.trainable_variables)
        return model

    found, wanted = make(), make()
    twice(wanted, wanted.optimizer.apply)
    strategy = kt.TowerStrategy(TOWERS, updates="sharded")
    with strategy:
        strategy.adopt(found)
        twice(
            found,
            lambda grads, weights: on_towers(strategy, found, grads, weights),
        )
        assert_towers_equal(found)
    same_model(found, wanted)


def test_frozen_and_unfrozen_layers():
    """A model that is compiled anew trains, and shares, other weights."""

    def act(model):
        first, second = model.layers[0], model.layers[-1]
        histories = []
        for frozen in (first, second):
            first.trainable = second.trainable = True
            frozen.trainable = False
            model.compile(adam(), model.loss)
            histories.append(fit(model))
        return histories

    strategy = kt.TowerStrategy(3, updates="sharded")
    assert_exact(classifier, act, strategy)


def test_one_tower_has_nobody_to_share_with(caplog):
    with caplog.at_level(logging.WARNING, "keras_towers"):
        strategy = kt.TowerStrategy(1, updates="sharded")
    assert strategy.updates == "once"
    assert "sharded" in caplog.text


def test_rules_for_names_hold_on_every_tower():
    """Keras looks for the name of the variable that it updates."""

    def make():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["kernel:0$"])
        model = classifier()
        model.compile(optimizer, model.loss)
        return model

    assert_exact(make, fit, kt.TowerStrategy(3, updates="sharded"))


@pytest.mark.parametrize("scaled", [False, True])
def test_slots_are_created_where_they_stay(scaled, monkeypatch):
    places = []
    place = slots.PlacedSlots.place

    def noted(self, slot, device, home):
        places.append(slot._value.device == device)
        place(self, slot, device, home)

    monkeypatch.setattr(slots.PlacedSlots, "place", noted)
    model = classifier()
    optimizer = keras.optimizers.Adam(0.01)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, model.loss)
    with kt.TowerStrategy(2, updates="sharded"):
        fit(model)
    assert len(places) >= 2 * len(model.trainable_variables) and all(places)


def test_what_has_no_room_on_the_way_back_leaves_nothing_half_done(
    monkeypatch,
):
    def no_room(variable, device):
        raise tf.errors.ResourceExhaustedError(None, None, "no room")

    model = classifier()
    model.compile("adam", model.loss)
    with (
        pytest.raises(tf.errors.ResourceExhaustedError),
        kt.TowerStrategy(3, updates="sharded"),
    ):
        fit(model)
        state = [v.numpy() for v in all_variables(model)]
        monkeypatch.setattr(slots.variables_lib, "moved", no_room)
    monkeypatch.undo()
    assert "apply" not in vars(model.optimizer)
    assert "fit" not in vars(model)
    for now, before in zip(all_variables(model), state, strict=True):
        close(now.numpy(), before)
    fit(model)
