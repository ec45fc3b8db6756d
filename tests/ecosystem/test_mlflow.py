"""MLflow's autolog, which wraps ``keras.Model.fit``."""

import contextlib
import functools
import os

import keras
import numpy as np
import pytest

import keras_towers as kt
from tests.kit.compare import same_model
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, Y, adam, classifier

# No server: runs are files. MLflow reads these when it is imported.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
mlflow = pytest.importorskip(
    "mlflow", reason="MLflow is not installed: make test-ecosystem"
)

EXACT = [kt.TowerStrategy, kt.ParameterServerTowerStrategy]


@pytest.fixture(autouse=True)
def autolog(tmp_path):
    """Turns it on; its runs are files of this test."""
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    yield functools.partial(
        mlflow.tensorflow.autolog, log_models=False, checkpoint=False
    )
    mlflow.tensorflow.autolog(disable=True)


def clipped():
    return classifier(optimizer=functools.partial(adam, clipnorm=0.1))


def use(model):
    """Batches that split unevenly; validation, evaluation, prediction."""
    options = {"batch_size": 8, "verbose": 0}
    history = model.fit(
        X[:53],
        Y[:53],
        epochs=2,
        shuffle=False,
        validation_data=(X[:11], Y[:11]),
        **options,
    ).history
    logs = model.evaluate(X[:21], Y[:21], return_dict=True, **options)
    return {**history, **logs, "outputs": model.predict(X[:21], **options)}


@contextlib.contextmanager
def logged_once():
    """Exactly one run is made inside, and both epochs are logged."""
    before = len(mlflow.search_runs())
    yield
    runs = mlflow.search_runs(output_format="list")
    assert len(runs) == before + 1
    client = mlflow.MlflowClient()
    for name in ("loss", "val_loss"):
        logged = client.get_metric_history(runs[0].info.run_id, name)
        assert [item.step for item in logged] == [0, 1]
    assert runs[0].data.params["epochs"] == "2"


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("when", ["before", "inside", "between"])
def test_weights_are_those_of_one_device(when, strategy, autolog):
    reference, model = clipped(), clipped()
    wanted = use(reference)
    if when == "before":
        autolog()
    if when == "between":
        with strategy(2):
            classifier().fit(X, Y, verbose=0)
        autolog()
    with strategy(3):
        if when == "inside":
            autolog()
        with logged_once():
            found = use(model)
        mlflow.tensorflow.autolog(disable=True)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
    same_model(model, reference)
    assert_ordinary(model)


def test_it_is_turned_on_in_one_block_and_used_in_others(autolog):
    reference, model = clipped(), clipped()
    for _ in range(2):
        wanted = use(reference)
    with kt.TowerStrategy(2):
        autolog()
    for _ in range(2):
        with kt.TowerStrategy(2), logged_once():
            found = use(model)
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    same_model(model, reference)
    assert_ordinary(model)
    with logged_once():
        use(model)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_asynchronous_towers(when, autolog):
    model = clipped()
    before = model.get_weights()
    if when == "before":
        autolog()
    with kt.AsyncTowerStrategy(2):
        if when == "inside":
            autolog()
        with logged_once():
            found = use(model)
        # Metrics are counted on every tower.
        assert len(model.metrics[0].variables[0].value.values) == 2
    assert all(np.isfinite(values).all() for values in found.values())
    assert any(
        (new != old).any()
        for new, old in zip(model.get_weights(), before, strict=True)
    )
    assert_ordinary(model)


def test_the_logged_model_is_that_of_the_towers(autolog):
    model = classifier()
    autolog(log_models=True)
    with kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    (run,) = mlflow.search_runs(output_format="list")
    loaded = mlflow.tensorflow.load_model(f"runs:/{run.info.run_id}/model")
    assert isinstance(loaded, keras.Model)
    same_weights = zip(loaded.get_weights(), model.get_weights(), strict=True)
    for mine, other in same_weights:
        np.testing.assert_array_equal(mine, other)
