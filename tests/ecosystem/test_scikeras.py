"""Estimators of scikit-learn that wrap a Keras model."""

import pytest

import keras_towers as kt
from tests.kit.compare import assert_close
from tests.kit.training import X, Y, classifier

scikeras = pytest.importorskip(
    "scikeras.wrappers", reason="SciKeras is not installed: make test-ecosystem"
)
base = pytest.importorskip("sklearn.base")
model_selection = pytest.importorskip("sklearn.model_selection")


def estimator():
    return scikeras.KerasClassifier(
        lambda: classifier(), epochs=2, batch_size=8, shuffle=False, verbose=0
    )


def test_fit_predict_and_cross_validation():
    wanted = estimator().fit(X, Y).predict_proba(X)
    scores = model_selection.cross_val_score(estimator(), X, Y, cv=2)
    with kt.TowerStrategy(2):
        mine = base.clone(estimator()).fit(X, Y)
        inside = mine.predict_proba(X)
        copied = base.clone(mine).fit(X, Y).predict_proba(X)
        found = model_selection.cross_val_score(estimator(), X, Y, cv=2)
    for outputs in (inside, copied, mine.predict_proba(X)):
        assert_close(outputs, wanted, 1e-5)
    assert_close(found, scores)
