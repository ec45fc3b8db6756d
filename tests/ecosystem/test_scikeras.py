"""Estimators of scikit-learn that wrap a Keras model."""

import numpy as np
import pytest

import keras_towers as kt
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


@pytest.mark.parametrize(
    "strategy", [kt.TowerStrategy, kt.ParameterServerTowerStrategy]
)
def test_fit_and_predict(strategy):
    wanted = estimator().fit(X, Y).predict_proba(X)
    with strategy(2):
        mine = base.clone(estimator()).fit(X, Y)
        inside = mine.predict_proba(X)
        copied = base.clone(mine).fit(X, Y).predict_proba(X)
    for found in (inside, copied, mine.predict_proba(X)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_cross_validation():
    wanted = model_selection.cross_val_score(estimator(), X, Y, cv=2)
    with kt.TowerStrategy(2):
        found = model_selection.cross_val_score(estimator(), X, Y, cv=2)
    np.testing.assert_allclose(found, wanted)
