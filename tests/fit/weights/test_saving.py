"""Saving, loading, exporting, copying: inside a block and after it."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.compare import close, same_model
from tests.kit.long import long_but
from tests.kit.ordinary import all_variables, assert_ordinary
from tests.kit.training import X, Y, adam, classifier, fit

# Towers differ in their moving statistics: what is saved has to be the mean.
batch_norm = keras.layers.BatchNormalization


def _values(model):
    return [v.numpy() for v in model.variables]


def _rest(model):
    """What is predicted, and what one more epoch of training gives."""
    return model.predict(X, verbose=0), fit(model)["loss"], _values(model)


def _same_rest(found, wanted, tolerance=2e-6):
    tf.nest.map_structure(lambda a, b: close(a, b, tolerance), found, wanted)


@pytest.mark.parametrize(
    "updates", long_but("each".__ne__, ["once", "each", "sharded"])
)
def test_keras_file_inside_and_after(updates, tmp_path):
    """Both files are the same model, with optimizer, and train on alike."""
    model = classifier(batch_norm())
    with kt.TowerStrategy(3, updates=updates):
        fit(model)
        model.save(tmp_path / "inside.keras")
        model.save_weights(tmp_path / "inside.weights.h5")
    model.save(tmp_path / "after.keras")
    wanted = None
    for name in ("inside.keras", "after.keras"):
        loaded = keras.models.load_model(tmp_path / name)
        assert int(loaded.optimizer.iterations) == 4
        for mine, other in zip(loaded.variables, _values(model), strict=True):
            close(mine.numpy(), other)
        wanted = wanted or _rest(loaded)
        if name == "after.keras":
            _same_rest(_rest(loaded), wanted)
    other = classifier(batch_norm())
    other.load_weights(tmp_path / "inside.weights.h5")
    for mine, value in zip(other.weights, model.weights, strict=True):
        close(mine.numpy(), value.numpy())


def test_loaded_inside_goes_on_and_is_ordinary_after(
    tmp_path, variables_on_towers
):
    reference = classifier()
    fit(reference)
    reference.save(tmp_path / "model.keras")
    fit(reference)
    with kt.TowerStrategy(3):
        model = keras.models.load_model(tmp_path / "model.keras")
        fit(model)
        untouched = keras.models.load_model(tmp_path / "model.keras")
    assert_ordinary(model)
    assert_ordinary(untouched)
    assert not variables_on_towers()
    same_model(model, reference)
    fit(untouched)
    same_model(untouched, reference)


def test_export_inside_and_after(tmp_path):
    model = classifier(batch_norm())
    with kt.TowerStrategy(3):
        fit(model)
        model.export(tmp_path / "inside", verbose=False)
        wanted = model.predict(X, verbose=0)
        fit_goes_on = fit(model)
    assert np.isfinite(fit_goes_on["loss"][-1])
    served = tf.saved_model.load(tmp_path / "inside")
    close(served.serve(X).numpy(), wanted, 1e-5)
    # One copy of every weight, not one for each tower.
    assert len(served.variables) == len(model.variables)
    model.export(tmp_path / "after", verbose=False)
    served = tf.saved_model.load(tmp_path / "after")
    close(served.serve(X).numpy(), model.predict(X, verbose=0), 1e-5)


@pytest.mark.parametrize(
    "updates", long_but("each".__ne__, ["once", "each", "sharded"])
)
def test_checkpoint_inside_and_after(updates, tmp_path):
    """``tf.train.Checkpoint`` of model and optimizer, written and restored."""

    def checkpoint(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    # Moving statistics are left out: they are in the tests of files above,
    # and differ between one device and towers.
    reference = classifier()
    fit(reference)
    model = classifier()
    with kt.TowerStrategy(3, updates=updates):
        fit(model)
        saved = _values(model)
        path = checkpoint(model).write(str(tmp_path / "inside"))
        fit(model)
        checkpoint(model).read(path).assert_existing_objects_matched()
        for variable, value in zip(model.variables, saved, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        assert int(model.optimizer.iterations) == 4
        # All towers have what was restored, not only the first.
        fit(model)
    fit(reference)
    same_model(model, reference)
    other = classifier()
    fit(other)
    checkpoint(other).read(path).assert_consumed()
    fit(other)
    for mine, wanted in zip(other.weights, reference.weights, strict=True):
        close(mine.numpy(), wanted.numpy())
    path = checkpoint(model).write(str(tmp_path / "after"))
    checkpoint(other).read(path).assert_consumed()
    for mine, wanted in zip(other.weights, model.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), wanted.numpy())


def test_checkpoint_of_plain_training_restored_inside(tmp_path):
    reference = classifier()
    fit(reference)
    path = tf.train.Checkpoint(m=reference, o=reference.optimizer).write(
        str(tmp_path / "plain")
    )
    fit(reference)
    model = classifier()
    with kt.TowerStrategy(3):
        fit(model)
        tf.train.Checkpoint(m=model, o=model.optimizer).read(path)
        fit(model)
    for mine, wanted in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), wanted.numpy())


def _pickled(model):
    return pickle.loads(pickle.dumps(model))


def _cloned(model):
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    twin.compile_from_config(model.get_compile_config())
    twin.optimizer.build(twin.trainable_variables)
    for mine, other in zip(
        twin.optimizer.variables, model.optimizer.variables, strict=True
    ):
        mine.assign(other)
    return twin


@pytest.mark.parametrize("twin_of", [_pickled, copy.deepcopy, _cloned])
def test_copies_made_inside_and_after(twin_of):
    """A copy is a model of its own, with the same state."""
    with kt.TowerStrategy(3):
        model = classifier()
        fit(model)
        inside = twin_of(model)
    after = twin_of(model)
    for twin in (inside, after):
        assert_ordinary(twin)
        assert twin.weights[0]._value is not model.weights[0]._value
    wanted = _rest(model)
    _same_rest(_rest(inside), wanted)
    _same_rest(_rest(after), wanted)
    assert len(all_variables(inside)) == len(all_variables(after))


def test_weights_as_arrays_are_those_of_the_towers():
    model = classifier(optimizer=adam)
    reference = classifier(optimizer=adam)
    fit(reference)
    with kt.TowerStrategy(3):
        fit(model)
        inside = model.get_weights()
        state = [np.array(v) for v in model.optimizer.variables]
    for found, wanted in zip(inside, reference.get_weights(), strict=True):
        close(found, wanted)
    for found, wanted in zip(state, reference.optimizer.variables, strict=True):
        close(found, wanted.numpy())
    close(model.evaluate(X, Y, verbose=0), reference.evaluate(X, Y, verbose=0))
