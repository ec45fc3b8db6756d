"""Where the weights of parameter-server towers are, and that they come back."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
Y = X[:, :2]


def build(optimizer="adam", synchronized=False):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.Dense(16),
            keras.layers.Dense(2),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def place(variable):
    return int(variable._value.device.rpartition(":")[2])


def fit(model, **options):
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize(
    "towers,expected", [(1, "gpu"), (2, "gpu"), (3, "cpu"), (8, "cpu")]
)
def test_default_by_the_number_of_towers(towers, expected):
    assert kt.ParameterServerTowerStrategy(towers).ps_device == expected


def test_weights_are_spread_by_bytes_and_exist_once():
    model = build()
    with kt.ParameterServerTowerStrategy(3, ps_device="gpu") as strategy:
        fit(model)
        loads = [0, 0, 0]
        for variable in model.trainable_variables:
            assert not hasattr(variable._value, "values")
            loads[place(variable)] += variable._value.shape.num_elements() * 4
        assert loads == list(strategy.placement.loads.values())
        largest = 16 * 16 * 4
        assert max(loads) - min(loads) <= largest
        assert len(model.layers[1].moving_mean._value.values) == 3
        assert f"{max(loads):,}" in strategy.describe()


@pytest.mark.parametrize("when", ["before", "inside"])
def test_slots_are_beside_their_weights(when):
    model = build()
    if when == "before":
        fit(model)
    with kt.ParameterServerTowerStrategy(4, ps_device="gpu"):
        fit(model)
        adam = model.optimizer
        slots = zip(
            model.trainable_variables,
            adam._momentums,
            adam._velocities,
            strict=True,
        )
        places = [tuple(map(place, three)) for three in slots]
        assert all(len(set(three)) == 1 for three in places)
        assert len(set(places)) > 1


@pytest.mark.parametrize("ps_device", ["cpu", "gpu"])
def test_update_is_computed_beside_its_weight(ps_device):
    seen = set()

    class Noting(keras.optimizers.AdamW):
        def update_step(self, gradient, variable, learning_rate):
            here = tf.identity(gradient * learning_rate).backing_device
            seen.add((variable.device, gradient.backing_device, here))
            super().update_step(gradient, variable, learning_rate)

    model = build(Noting(0.01))
    model.run_eagerly = True
    towers = ["/device:CPU:2", "/device:CPU:1"]
    with kt.ParameterServerTowerStrategy(towers, ps_device):
        fit(model)
    places = {place for place, *_ in seen}
    assert seen == {(place, place, place) for place in places}
    assert sorted(int(place[-1]) for place in places) == (
        [0] if ps_device == "cpu" else [1, 2]
    )


def test_description_tells_where_the_weights_were():
    model = build()
    with kt.ParameterServerTowerStrategy(2) as strategy:
        assert "bytes" not in strategy.describe()
        fit(model)
        inside = strategy.describe()
    assert re.search(r"bytes\n +/device:CPU:0 .* [1-9]", inside)
    assert strategy.describe() == inside


def test_on_the_host_all_are_there():
    model = build()
    with kt.ParameterServerTowerStrategy(4, ps_device="cpu"):
        fit(model)
        weights = [*model.trainable_variables, *model.optimizer.variables]
        assert {place(variable) for variable in weights} == {0}


def test_references_stay_alive_and_training_goes_on():
    model, reference = build(synchronized=True), build()
    held = [v._value for v in model.trainable_variables]
    slots = None
    for fitted in (model, reference):
        fit(fitted)
    slots = [v._value for v in model.optimizer.variables]
    with kt.ParameterServerTowerStrategy(2, ps_device="gpu"):
        fit(model)
    fit(reference)
    with kt.TowerStrategy(2):
        fit(model)
    fit(reference)
    fit(model)
    fit(reference)
    now = [v._value for v in model.trainable_variables]
    assert all(a is b for a, b in zip(now, held, strict=True))
    now = [v._value for v in model.optimizer.variables]
    assert all(a is b for a, b in zip(now, slots, strict=True))
    for a, b in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-5)


def test_model_comes_back_after_an_error():
    class Boom(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("boom")

    model = build()
    held = [v._value for v in model.trainable_variables]
    before = [v.numpy() for v in held]
    with (
        pytest.raises(RuntimeError, match="boom"),
        kt.ParameterServerTowerStrategy(2),
    ):
        fit(model, callbacks=[Boom()])
    for value, variable, start in zip(
        held, model.trainable_variables, before, strict=True
    ):
        assert variable._value is value
        assert (value.numpy() != start).any() or "bias" in variable.path


def test_built_inside():
    with kt.ParameterServerTowerStrategy(3, ps_device="gpu"):
        model = build()
        fit(model)
        inside = model.get_weights()
    reference = build()
    fit(reference)
    for a, b in zip(inside, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not any(
        hasattr(v._value, "values")
        for v in [*model.variables, *model.optimizer.variables]
    )
    fit(model)


def test_every_block_places_anew():
    strategy, model = kt.ParameterServerTowerStrategy(2), build()
    for _ in range(2):
        with strategy:
            fit(model)
            placed = strategy.placement.placed
            assert len(placed) == len(model.trainable_variables)


def test_an_unknown_place_is_refused():
    with pytest.raises(kt.TowerError, match="'tpu'.*'cpu', 'gpu'"):
        kt.ParameterServerTowerStrategy(2, ps_device="tpu")


def test_by_name():
    strategy = kt.strategy("parameter-server", towers=2)
    assert type(strategy) is kt.ParameterServerTowerStrategy
