"""What ``fit`` warns of is never safe."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit import contract, told
from keras_towers.fit.weights import state as state_lib
from keras_towers.verification import Kind
from tests.kit.long import long_but
from tests.verification import models as m
from tests.verification.told import (
    DRAWS,
    REFUSED,
    WARNED,
    Drawing,
    Mixing,
    Writing,
    X,
    Y,
    made,
    own,
)

ABOUT_SPEED = ("jit_compile is off",)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    """Nothing has been said in this process."""
    monkeypatch.setattr(told, "_said", set())


@pytest.fixture
def warned(caplog):
    """What training on towers warns of."""

    def of(model, *data):
        caplog.clear()
        options = {} if len(data) == 1 else {"batch_size": 8}
        with kt.TowerStrategy(2, exact=True):
            model.fit(*data, verbose=0, **options)
        # TensorFlow's own are of how often a process has traced.
        messages = [
            record.getMessage()
            for record in caplog.records
            if record.name == "keras_towers"
        ]
        return [x for x in messages if not x.startswith(ABOUT_SPEED)]

    return of


def verified(model, *data):
    return kt.verify(model, *data, batch_size=8, batches=1, exact=True)


# The others repeat it for other draws, logs and variables.
KEPT = (
    *("masked", "in a function", "normal", "a function", "jit"),
    *("fixed batches", "eager", "steps", "mean", "plain", "parts"),
)


@pytest.mark.parametrize("name", long_but(KEPT.__contains__, WARNED))
def test_what_fit_warns_of_is_not_safe(name, warned):
    model, *data = WARNED[name]()
    before = verified(model, *data)
    messages = warned(model, *data)
    after = verified(model, *data)
    assert messages
    assert not before.safe and not after.safe
    kinds = [f.kind for f in before.findings]
    assert kinds == [f.kind for f in after.findings]
    assert Kind.FAILS not in kinds, str(before)
    if name in DRAWS:
        assert kinds == [Kind.RANDOM], str(before)


@pytest.mark.parametrize("name", REFUSED)
def test_what_fit_refuses_is_not_safe(name):
    model, *data = REFUSED[name]()
    report = verified(model, *data)
    assert [f.kind for f in report.findings] == [Kind.FAILS], str(report)
    with (
        pytest.raises(Exception) as raised,
        kt.TowerStrategy(2, exact=True),
    ):
        model.fit(*data, verbose=0)
    assert type(raised.value).__name__ in report.findings[0].message


SILENT = {
    "sequence": lambda: (
        m.compiled(
            keras.Sequential(
                [
                    keras.Input((4, 6)),
                    layers.Dense(8),
                    layers.Dropout(0.3),
                    layers.GlobalAveragePooling1D(),
                    layers.Dense(3),
                ]
            )
        ),
        m.WALKS,
        Y,
    ),
    "mean": lambda: (made(Writing, own, kt.mean), X, Y),
    "mixup": lambda: (made(Mixing), X, Y),
    "draw": lambda: (
        made(Drawing, lambda _, x: keras.random.dropout(x, 0.3, seed=2)),
        X,
        Y,
    ),
    "jit": lambda: (m.compiled(m.classifier(), jit_compile=True), X, Y),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_fit_is_silent_about_stays_safe(name, warned):
    model, *data = SILENT[name]()
    report = verified(model, *data)
    assert report.safe, str(report)
    assert not warned(model, *data)


def test_all_that_is_told_is_listed():
    def draws(model, x):
        return DRAWS["half"](model, x)[:1] + DRAWS["half"](model, x[:, :1])[:1]

    report = verified(made(Drawing, draws), X, Y)
    assert [f.kind for f in report.findings] == 2 * [Kind.RANDOM]
    assert "is not known to be that of one device" in str(report)
    assert all("fit warns" in f.message for f in report.findings)
    assert "loop" in report.remedies[0]


def test_nothing_is_left_behind():
    model = made(Drawing, DRAWS["in a function"])
    model(X[:1])
    before = [v.numpy() for v in state_lib.collect(model).everything()]
    attributes = dict(vars(model))
    assert not verified(model, X, Y).safe
    assert dict(vars(model)) == attributes
    assert contract.home_of(model) is None
    after = state_lib.collect(model).everything()
    for value, variable in zip(before, after, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())
        assert isinstance(variable._value, tf.Variable)
    assert model.function.experimental_get_tracing_count() == 0
    assert not told._said
