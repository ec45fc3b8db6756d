"""Saving, loading, exporting, copying: inside a block and after it."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance.outcomes import (
    all_variables,
    assert_ordinary,
)
from tests.fit.one_device import trained
from tests.kit.compare import assert_all_close, assert_close, assert_same_model
from tests.kit.sampling import sample_of
from tests.kit.training import X, adam, fit, linear

pytestmark = pytest.mark.alternate


def build():
    # Towers differ in their moving statistics: saved has to be the mean.
    return linear(keras.layers.BatchNormalization(), optimizer=adam)


def _keras_file(model, folder):
    model.save(folder / "model.keras")
    return lambda: keras.models.load_model(folder / "model.keras")


def _both(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def _checkpoint(model, folder):
    path = _both(model).write(str(folder / "checkpoint"))

    def read():
        twin = build()
        twin.optimizer.build(twin.trainable_variables)
        _both(twin).read(path).assert_consumed()
        return twin

    return read


def _pickled(model, folder):
    twin = pickle.loads(pickle.dumps(model))
    return lambda: twin


def _deep_copy(model, folder):
    twin = copy.deepcopy(model)
    return lambda: twin


def assert_equal_variables(one, other):
    assert_all_close(one.variables, other.variables)


# Functions that copy a model with its optimizer; they return a function
# that returns the copy.
COPIES = [_keras_file, _checkpoint, _pickled, _deep_copy]


@pytest.mark.parametrize("updates", sample_of(["once", "sharded"]))
def test_copies_made_inside_and_after(updates, tmp_path):
    """Both have the same state, and are models of their own."""
    model = build()
    folders = [tmp_path / "inside", tmp_path / "after"]
    for folder in folders:
        folder.mkdir()
    weights = tmp_path / "inside.weights.h5"
    with kt.TowerStrategy(2, updates=updates):
        fit(model)
        inside = [make(model, folders[0]) for make in COPIES]
        model.save_weights(weights)
    after = [make(model, folders[1]) for make in COPIES]
    copies = [give() for give in inside + after]
    state = [v.numpy() for v in all_variables(model)]
    for index, twin in enumerate(copies):
        # Files are read after the block.
        made_inside = index in range(2, len(COPIES))
        assert_ordinary(twin, trains_on_towers=made_inside)
        assert int(twin.optimizer.iterations) == 4
        # Files have no sums of metrics.
        assert_equal_variables(twin, model)
        assert_equal_variables(twin.optimizer, model.optimizer)
    loaded = build()
    loaded.load_weights(weights)
    assert_equal_variables(loaded, model)
    if updates == "sharded":
        return
    # A tower's share of a batch has statistics of its own.
    on_one_device = [copies[0], copies[-1]]
    for one in (*on_one_device, model):
        one.run_eagerly = True
    losses = [fit(twin)["loss"] for twin in on_one_device]
    assert_all_close(all_variables(model), state, 0)
    assert_close(losses, len(losses) * [fit(model)["loss"]])


def test_loaded_inside_goes_on_and_is_ordinary_after(
    tmp_path, variables_on_towers
):
    trained(1).save(tmp_path / "model.keras")
    with kt.TowerStrategy(2):
        model = keras.models.load_model(tmp_path / "model.keras")
        fit(model)
        untouched = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, untouched):
        assert_ordinary(one, trains_on_towers=True)
    assert not variables_on_towers()
    assert_same_model(model, trained(2))
    fit(untouched)
    assert_same_model(untouched, trained(2))


def test_a_model_loaded_inside_has_the_paths_of_one_loaded_outside(tmp_path):
    inner = keras.optimizers.Adam
    model = linear(
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(inner())
    )
    fit(model)
    model.save(tmp_path / "model.keras")

    def paths():
        loaded = keras.models.load_model(tmp_path / "model.keras")
        return [
            v.path for v in (*loaded.variables, *loaded.optimizer.variables)
        ]

    outside = paths()
    with kt.TowerStrategy(2):
        assert paths() == outside


def test_export_inside_and_after(tmp_path):
    model = build()
    with kt.TowerStrategy(2):
        fit(model)
        model.export(tmp_path / "inside", verbose=False)
        wanted = model.predict(X, verbose=0)
        assert np.isfinite(fit(model)["loss"][-1])
    served = tf.saved_model.load(tmp_path / "inside")
    assert_close(served.serve(X).numpy(), wanted, 1e-5)
    # One copy of every weight, not one for each tower.
    assert len(served.variables) == len(model.variables)
    model.export(tmp_path / "after", verbose=False)
    wanted = model.predict(X, verbose=0)
    served = tf.saved_model.load(tmp_path / "after")
    assert_close(served.serve(X).numpy(), wanted, 1e-5)
    with kt.TowerStrategy(2) as towers:
        loaded = tf.saved_model.load(tmp_path / "after")
        assert_close(tf.function(loaded.serve)(X), wanted, 1e-5)
        assert_close(towers.run(loaded.serve, (X,)).values[1], wanted, 1e-5)
        signature = loaded.signatures["serving_default"]
        (output,) = signature(tf.constant(X)).values()
        assert_close(output, wanted, 1e-5)
    assert_close(loaded.serve(X), wanted, 1e-5)


@pytest.mark.parametrize("updates", sample_of(["each", "sharded"]))
def test_checkpoint_of_plain_training_restored_inside(updates, tmp_path):
    model = linear()
    path = _both(trained(1)).write(str(tmp_path / "plain"))
    saved = [v.numpy() for v in all_variables(trained(1))]
    with kt.TowerStrategy(2, updates=updates):
        fit(model, epochs=2)
        _both(model).read(path).assert_existing_objects_matched()
        for variable, value in zip(
            (*model.variables, *model.optimizer.variables), saved, strict=False
        ):
            np.testing.assert_array_equal(variable.numpy(), value)
        # All towers have what was restored, not only the first.
        fit(model)
    assert_same_model(model, trained(2))
