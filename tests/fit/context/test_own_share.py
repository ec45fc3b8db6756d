"""``fit`` says what does not train as on one device."""

import pytest
from keras import layers

import keras_towers as kt
from keras_towers.fit import told
from keras_towers.fit.context import own_share
from tests.kit.training import classifier, fit


@pytest.fixture
def said(monkeypatch):
    lines = []
    # Models of other tests may have had the same names.
    monkeypatch.setattr(told, "_said", set())
    monkeypatch.setattr(own_share, "announce", lines.append)
    return lines


def test_once_and_by_name(said):
    model = classifier(
        layers.BatchNormalization(name="norm"), layers.Dropout(0.2)
    )
    with kt.TowerStrategy(2):
        fit(model)
        fit(model)
    (line,) = said
    assert model.name in line
    assert "BatchNormalization (norm)" in line
    assert "random layers" in line
    assert "exact=True" in line


@pytest.mark.parametrize(
    ("middle", "options", "word"),
    [
        (layers.BatchNormalization, {"random": "global"}, "statistics"),
        (layers.BatchNormalization, {"batch_norm": "global"}, None),
        (layers.LayerNormalization, {}, None),
        (lambda: layers.Dropout(0.2), {"batch_norm": "global"}, "random"),
        (lambda: layers.Dropout(0.2), {"exact": True}, None),
        (lambda: layers.Dropout(0.2), {"batches": "each"}, None),
    ],
)
def test_what_an_option_makes_equal_is_not_said(middle, options, word, said):
    model = classifier(middle())
    with kt.TowerStrategy(2, **options):
        fit(model)
    assert len(said) == (word is not None)
    assert all(word in line for line in said)
