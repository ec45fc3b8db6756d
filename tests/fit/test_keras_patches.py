"""Patches of Keras: what calls it trains on towers, and all are undone."""

import contextlib
import functools
import pathlib
import re
import sys
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit import keras_patches
from keras_towers.fit.context import patches
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from keras_towers.strategies import keras_distribution
from tests.fit.one_device import trained
from tests.kit import compare
from tests.kit.sampling import sample_of
from tests.kit.training import X, Y, fit, linear

pytestmark = pytest.mark.alternate


def test_each_file_that_patches_is_listed():
    folder = pathlib.Path(kt.__file__).parent
    listed = re.findall(r"``(\w[\w/]*\.py)``", keras_patches.__doc__)
    assert all((folder / name).exists() for name in listed)
    patching = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search("context import patches", path.read_text())
    }
    assert patching - {*listed} == {"fit/keras_patches.py"}


def _everything() -> dict:
    """Every attribute of every module and class of Keras, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src") and module is not None:
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type) and "keras" in value.__module__:
                    for attribute, item in list(vars(value).items()):
                        # Python adds these when they are first asked for.
                        if attribute not in ("_abc_impl", "__annotations__"):
                            found[name, key, attribute] = _in_decorator(item)
    return found


def _in_decorator(item):
    """The function inside of a decorator of Keras."""
    code = getattr(item, "__code__", None)
    is_ours = code is not None and code.co_filename == patches.__file__
    inner = getattr(item, "__wrapped__", None)
    is_decorated = not is_ours and any(
        cell.cell_contents is inner
        for cell in getattr(item, "__closure__", None) or ()
    )
    return inner if is_decorated else item


def _changed(before: dict) -> set:
    now = _everything()
    missing = object()
    return {
        key
        for key in before.keys() | now.keys()
        if before.get(key, missing) is not now.get(key, missing)
    }


class Boom(BaseException):
    pass


class Looks(keras.layers.Layer):
    """Sees what is replaced while a step is traced."""

    def call(self, x):
        self.look()
        return x


@pytest.mark.core
def test_everything_is_put_back():
    looks = Looks()
    looks.look = seen = mock.Mock()
    model = linear(looks)
    fit(model)  # imports what Keras imports late
    before = _everything()
    strategy = kt.TowerStrategy(2)
    seen.reset_mock()
    in_steps = set()
    seen.side_effect = lambda: in_steps.update(_changed(before))

    def stop(batch, logs):
        raise Boom

    with strategy.scope():
        inside = _changed(before)
        with strategy.scope():
            pass
        # Patched until the last scope is left.
        assert _changed(before) == inside
    assert not _changed(before)
    with contextlib.suppress(Boom), strategy:
        note = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        fit(model, callbacks=[note])
    # A step is traced as it is: nothing more is replaced for it.
    assert in_steps == inside
    assert not _changed(before)
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with stock.scope(), pytest.raises(kt.TowerError):
        strategy.__enter__()
    assert not _changed(before)


def test_disconnecting_keras_distribution_restores_keras():
    keras_distribution.disconnect()
    try:
        before = _everything()
        keras_distribution.connect()
        assert _changed(before)
        keras_distribution.disconnect()
        assert not _changed(before)
    finally:
        keras_distribution.connect()


def test_another_thread_trains_as_plain_keras():
    """It is traced inside the block, steps beside towers, and ends after it.

    The patches are in force for the whole process, the strategy is not.
    """
    epochs = 8
    reference, model, on_towers = linear(), linear(), linear()
    reference.run_eagerly = True
    wanted = fit(reference, epochs)
    going, left = threading.Event(), threading.Event()
    results = []

    def wait(epoch, logs):
        if epoch == 0:
            going.set()
        if epoch == epochs - 2:
            left.wait(60)

    def work():
        note = keras.callbacks.LambdaCallback(on_epoch_end=wait)
        history = fit(model, epochs, callbacks=[note])
        results.append((history, tf.distribute.has_strategy()))

    thread = threading.Thread(target=work)
    with kt.TowerStrategy(2):
        thread.start()
        # Keras may not be traced by two threads at a time.
        assert going.wait(60)
        fit(on_towers, epochs)
    left.set()
    thread.join(60)
    ((history, has_strategy),) = results
    compare.assert_same_history(history, wanted, 1e-5)
    assert not has_strategy
    assert model.distribute_strategy is tf.distribute.get_strategy()
    for each in (model, on_towers):
        assert_ordinary(each)
        compare.assert_same_model(each, reference, 1e-5)


def test_another_thread_makes_an_optimizer_under_a_stock_strategy():
    stock, made = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), []

    def work():
        with stock.scope():
            made.append(keras.optimizers.SGD())

    thread = threading.Thread(target=work)
    with kt.TowerStrategy(2):
        made.append(keras.optimizers.SGD())
        thread.start()
        thread.join(60)
    own, of_stock = (optimizer._distribution_strategy for optimizer in made)
    assert own is not stock and of_stock is stock


@pytest.mark.parametrize(
    "name, value, inside",
    [
        ("jit_compile", True, False),
        ("jit_compile", "auto", True),
        ("run_eagerly", True, None),
    ],
)
def test_how_a_model_was_compiled_is_restored(name, value, inside):
    plain, model = linear(**{name: value}), linear(**{name: value})
    with kt.TowerStrategy(2):
        model.predict_on_batch(X[:8])
    assert model.jit_compile is plain.jit_compile
    assert model.run_eagerly is plain.run_eagerly
    config = model.get_compile_config()
    assert config[name] == plain.get_compile_config()[name]
    # XLA compiles it, where that was asked for.
    assert np.isfinite(model.predict_on_batch(X[:8])).all()
    if inside is None:
        return
    # The settings of the last compile() count after the block, too.
    with kt.TowerStrategy(2):
        model.predict_on_batch(X)
        model.compile("sgd", m.cross_entropy(), jit_compile=inside)
        model.predict_on_batch(X)
    assert model.jit_compile is inside


def test_own_optimizer_defined_inside():
    """A notebook's cell may define it after the strategy is entered."""
    defined = []

    def act(model):
        class Late(keras.optimizers.SGD):
            def apply(self, grads, trainable_variables=None):
                grads = [tf.sign(grad) for grad in grads]
                return super().apply(grads, trainable_variables)

        defined.append(Late)
        model.compile(
            Late(0.01), m.cross_entropy(), run_eagerly=model.run_eagerly
        )
        return fit(model)

    compare.assert_exact(linear, act, kt.TowerStrategy(2))
    # It is an ordinary class again.
    assert defined[-1].apply.__code__.co_name == "apply"


NAMES = ("fit", "evaluate", "predict")


def wrap_class(monkeypatch):
    """Wrap methods of all models, as libraries that log runs do."""
    for name in NAMES:
        original = getattr(keras.Model, name)

        @functools.wraps(original)
        def logged(model, *args, original=original, **kwargs):
            return original(model, *args, **kwargs)

        monkeypatch.setattr(keras.Model, name, logged, raising=False)


def all_methods(model):
    """Train on batches that do not split evenly; evaluate and predict."""
    evaluated = {"validation_data": (X[:11], Y[:11]), "verbose": 0}
    return [
        model.fit(X, Y, batch_size=9, shuffle=False, **evaluated).history,
        model.evaluate(X[:21], Y[:21], verbose=0),
        model.predict(X[:21], verbose=0),
    ]


@functools.cache
def on_one_device():
    return compare.use_model(
        functools.partial(linear, run_eagerly=True), all_methods
    )


@pytest.mark.parametrize(
    "when", sample_of(["before", "inside", "between"], part=3)
)
def test_a_library_that_wraps_all_models(when, monkeypatch):
    wrapped = functools.partial(wrap_class, monkeypatch)

    def act(model):
        if when == "inside":
            wrapped()
        found = all_methods(model)
        if when == "inside":
            monkeypatch.undo()
        return found

    if when == "between":
        with kt.TowerStrategy(2):
            linear().predict(X, verbose=0)
    wanted = on_one_device()
    if when != "inside":
        wrapped()
    compare.assert_same(
        compare.use_model(linear, act, kt.TowerStrategy(2)), wanted
    )


def test_methods_that_were_read_before_the_block():
    def make():
        model = linear()
        model.taken = [getattr(model, n) for n in (*NAMES, "train_on_batch")]
        return model

    class Taken:
        pass

    def act(model):
        taken = Taken()
        taken.fit, taken.evaluate, taken.predict, train_on_batch = model.taken
        return all_methods(taken), train_on_batch(X[:7], Y[:7])

    compare.assert_exact(make, act, kt.TowerStrategy(2))


@pytest.fixture
def as_before_the_import():
    """Keras as it is before keras_towers is imported."""
    keras_distribution.disconnect()
    yield
    keras_distribution.connect()


def test_a_batch_method_that_was_read_before_the_block_is_refused(
    as_before_the_import,
):
    model = linear()
    before = model.get_weights()
    for name in ("train", "test", "predict"):
        taken = getattr(model, f"{name}_on_batch")
        data = (X[:8],) if name == "predict" else (X[:8], Y[:8])
        with (
            kt.TowerStrategy(2),
            pytest.raises(kt.TowerError, match="import keras_towers first"),
        ):
            taken(*data)
        np.testing.assert_equal(model.get_weights(), before)
        assert_ordinary(model)


@pytest.mark.parametrize("kind", ["fit", "predict", "test_on_batch"])
def test_a_method_is_refused_on_each_tower(kind):
    model, strategy = linear(), kt.TowerStrategy(2)
    call = functools.partial(getattr(model, kind), X[:8])
    for run in (strategy.run, kt.run_on_each_tower):
        with strategy, pytest.raises(kt.TowerError, match=f"^{kind} of .* on"):
            run(call)
    assert_ordinary(model)


@pytest.fixture
def nothing_left():
    """Variables made after the block know nothing of the strategy."""
    yield
    assert not tf.distribute.has_strategy()
    for variable in (tf.Variable(1.0), keras.Variable(1.0).value):
        assert not isinstance(variable, tf.distribute.DistributedValues)
        assert not hasattr(variable, "_distributed_container")
    assert not tf.compat.v1.get_default_graph()._distribution_strategy_stack


def test_models_from_before_and_after_clear_session_train_exactly(
    variables_on_towers, nothing_left
):
    outside, reference = linear(), trained(2)
    losses = [trained(fits).history.history["loss"] for fits in (1, 2)]
    with kt.TowerStrategy(2) as towers:
        inside = linear()
        for model in (outside, inside):
            compare.assert_close(fit(model)["loss"], losses[0])
        for _ in range(2):
            keras.utils.clear_session()
            assert tf.distribute.get_strategy() is towers
            assert tf.distribute.in_cross_replica_context()
        after = linear()
        for model in (outside, inside):
            compare.assert_close(fit(model)["loss"], losses[1])
        for wanted in losses:
            compare.assert_close(fit(after)["loss"], wanted)
        compare.assert_close(
            after.predict(X, verbose=0), reference.predict(X, verbose=0)
        )
    assert not variables_on_towers()
    for model in (outside, inside, after):
        compare.assert_same_model(model, reference)
        assert_ordinary(model, trains_on_towers=model is not outside)
