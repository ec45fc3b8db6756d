"""``keras.distribution`` trains on towers once keras_towers is imported."""

import logging
import threading

import keras
import pytest
import tensorflow as tf
from keras.src.distribution.distribution_lib import Distribution

import keras_towers as kt
from keras_towers.fit import components
from keras_towers.foundation import notices
from keras_towers.inspection.conformance import case_models as m
from keras_towers.inspection.conformance.outcomes import (
    Originals,
    assert_ordinary,
)
from keras_towers.jobs.rendezvous import launchers
from keras_towers.strategies import keras_distribution as distribution_lib
from tests.kit import compare
from tests.kit.training import X, Y, fit, linear

pytestmark = pytest.mark.alternate

DataParallel = keras.distribution.DataParallel
set_distribution = keras.distribution.set_distribution


def first(number: int) -> DataParallel:
    return DataParallel(devices=[f"cpu:{index}" for index in range(number)])


def eager() -> keras.Model:
    """A model of which nothing is traced, where only its place matters."""
    return linear(run_eagerly=True)


def step(model: keras.Model, **options):
    return fit(model, x=X[:16], y=Y[:16], **options)


def at_end(act) -> keras.callbacks.Callback:
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: act())


@pytest.fixture(autouse=True)
def end():
    yield
    set_distribution(None)


def towers_of(model: keras.Model) -> list[str]:
    """The devices that a model stays on."""
    devices = components.strategy_of(model).extended.worker_devices
    return [device[-5:] for device in devices]


@pytest.mark.core
def test_every_call_gives_what_one_device_gives():
    """The last batches are uneven, or smaller than the number of towers."""
    mesh = keras.distribution.DeviceMesh(
        (3,), ["batch"], ["cpu:5", "cpu:2", "cpu:1"]
    )
    distribution, seen = DataParallel(device_mesh=mesh), []

    def look():
        seen.append(keras.distribution.distribution())
        seen.extend(tf.distribute.get_strategy().extended.worker_devices)

    def reference(model, callbacks=()):
        options = {"callbacks": callbacks, "validation_data": (X[:9], Y[:9])}
        history = fit(model, x=X[:50], y=Y[:50], **options)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(model(X[:8]) ** 2)
        # Between the calls, a loop by hand is on one device.
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return [
            history,
            model.train_on_batch(X[:7], Y[:7]),
            model.test_on_batch(X[:7], Y[:7]),
            model.predict_on_batch(X[:7]),
            model.evaluate(X[:21], Y[:21], verbose=0),
            model.predict(X[:21], verbose=0),
        ]

    def act(model):
        found = reference(model, [at_end(look)])
        assert len(towers_of(model)) == 3
        return found

    compare.assert_exact(linear, act, distribution.scope(), reference)
    assert seen[0] is distribution
    assert [name[-5:] for name in seen[1:]] == ["CPU:5", "CPU:2", "CPU:1"]


@pytest.mark.core
def test_a_model_stays_on_towers_until_the_distribution_ends():
    traces = []

    def loss(y, found):
        traces.append(1)
        return keras.losses.sparse_categorical_crossentropy(y, found, True)

    reference, model = eager(), linear()
    model.compile(m.momentum(), loss)
    originals = Originals(model)
    history = fit(reference, epochs=2), fit(reference)
    set_distribution(first(3))
    found = [fit(model, epochs=2)]
    once = len(traces)
    found.append(fit(model))
    assert len(traces) == once
    compare.assert_towers_equal(model)
    assert towers_of(model) == ["CPU:0", "CPU:1", "CPU:2"]
    assert not tf.distribute.has_strategy()
    set_distribution(None)
    originals.assert_back()
    for mine, wanted in zip(found, history, strict=True):
        compare.assert_same_history(mine, wanted)
    compare.assert_same_model(model, reference)
    # Each goes on as an ordinary model.
    compare.assert_same_history(fit(model), fit(reference))


def _in_thread(act):
    thread = threading.Thread(target=act, name="other")
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.core
def test_another_thread_is_told_of_the_distribution(caplog, monkeypatch):
    """It trains on one device, as a thread without the block does."""
    monkeypatch.setattr(notices, "_said", {})
    reference, model = eager(), eager()

    def train():
        step(model)
        step(reference)
        assert_ordinary(model)

    def train_on_towers():
        set_distribution(first(3))
        step(model)
        assert len(towers_of(model)) == 3
        set_distribution(None)

    set_distribution(first(1))
    _in_thread(train)
    set_distribution(first(2))
    _in_thread(train_on_towers)
    step(reference)
    set_distribution(None)
    _in_thread(train)
    set_distribution(first(2))
    # It ends the distribution of every thread.
    _in_thread(keras.utils.clear_session)
    _in_thread(train)
    assert "runs on one device" not in caplog.text
    set_distribution(first(2))
    for _ in range(2):
        _in_thread(train)
    # Of each of the two models.
    said, _ = [r for r in caplog.messages if "runs on one device" in r]
    assert "the distribution DataParallel was set in thread 'Main" in said
    assert "this is thread 'other'. Set it in the thread that calls fit" in said
    compare.assert_same_model(model, reference)


def test_a_model_follows_the_distribution():
    assert keras.distribution.list_devices() == [f"cpu:{i}" for i in range(8)]
    assert keras.distribution.get_device_count() == 8
    reference, model = eager(), eager()
    for _ in range(4):
        step(reference)
    with DataParallel().scope():
        model.predict(X[:8], verbose=0)
        assert len(towers_of(model)) == 8
    set_distribution(first(2))
    step(model)
    assert len(towers_of(model)) == 2
    with first(3).scope():
        assert_ordinary(model)
        step(model)
        assert len(towers_of(model)) == 3
    assert_ordinary(model)
    step(model)
    assert len(towers_of(model)) == 2
    # It ends the distribution, too.
    keras.utils.clear_session()
    step(model)
    assert_ordinary(model)
    compare.assert_same_model(model, reference)


def test_a_distribution_inside_a_strategy_is_refused():
    model = eager()
    set_distribution(first(2))
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
    for strategy in (kt.TowerStrategy(2), kt.TowerStrategy(1), stock):
        with strategy, pytest.raises(kt.TowerError, match="leave that scope"):
            step(model)
    step(model)
    assert len(towers_of(model)) == 2


def of_users():
    """A distribution of a class that Keras does not have."""
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    return Distribution(mesh, "batch")


@pytest.mark.parametrize(
    ("distribution", "said"),
    [
        (of_users, "Distribution is not available"),
        (lambda: DataParallel(devices=["gpu:7"]), "no device 'gpu:7'"),
        (lambda: first(2), "while a model trains"),
    ],
)
def test_other_distributions_devices_and_changes_are_refused(
    distribution, said
):
    model, note = eager(), at_end(lambda: set_distribution(None))
    with pytest.raises(kt.TowerError, match=said), distribution().scope():
        step(model, callbacks=[note])
    assert keras.distribution.distribution() is None
    assert_ordinary(model)


class Joined:
    """A job as a rank knows it."""

    rank, size = 1, 2


def test_devices_of_a_job(monkeypatch):
    monkeypatch.setattr(distribution_lib, "_job", Joined)
    of_rank = distribution_lib._devices_of_rank
    names = keras.distribution.list_devices()
    assert names == [f"cpu:{index}" for index in range(16)]
    assert keras.src.backend.distribution_lib.num_processes() == 2
    assert of_rank(names, 1, 2) == [f"cpu:{index}" for index in range(8)]
    assert of_rank(["gpu:0", "gpu:1"], 1, 2) == ["gpu:0"]
    for wrong in (["cpu:0"], ["cpu:0", "cpu:8", "cpu:9"]):
        with pytest.raises(kt.TowerError, match="each of the 2 processes"):
            of_rank(wrong, 1, 2)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_keras_does_not_divide_the_data_of_a_job_itself(kind):
    """Each rank would train on a part of its part."""

    def reference(model):
        data = tf.data.Dataset.from_tensor_slices((X[:32], Y[:32])).batch(8)
        given = {"x": X[:32], "y": Y[:32]} if kind == "arrays" else {"x": data}
        return model.fit(**given, shuffle=False, batch_size=None, verbose=0)

    distribution = first(2)
    # As Keras sees it in a job of two ranks.
    vars(distribution).update(_is_multi_process=True, _num_processes=2)
    compare.assert_exact(eager, reference, distribution.scope())
    assert vars(distribution)["_is_multi_process"]


def test_towers_are_announced_once(capsys):
    with first(3).scope():
        for _ in range(2):
            step(eager())
    said = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("TowerStrategy: 3 towers") for line in said) == 1


def test_a_job_is_joined_before_training(monkeypatch, caplog):
    of_two = launchers.detect({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"})
    monkeypatch.setattr(launchers, "detect", lambda: None)
    with caplog.at_level(logging.WARNING, "keras_towers"):
        keras.distribution.initialize()
    assert "keras-towers run" in caplog.text
    with pytest.raises(kt.TowerError, match="no launcher started"):
        keras.distribution.initialize(num_processes=2)
    monkeypatch.setattr(launchers, "detect", lambda: of_two)
    with pytest.raises(kt.TowerError, match="initialize"), first(2).scope():
        step(eager())
