"""MLflow's autolog, which wraps ``keras.Model.fit``."""

import contextlib
import functools
import os

import keras
import pytest

import keras_towers as kt
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.kit.compare import (
    assert_all_close,
    assert_same_history,
    assert_same_model,
)
from tests.kit.training import X, Y, adam, classifier

# No server: runs are files. MLflow reads these when it is imported.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
mlflow = pytest.importorskip(
    "mlflow", reason="MLflow is not installed: make test-ecosystem"
)


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
    validation = {"validation_data": (X[:11], Y[:11])}
    fit = model.fit(X, Y, epochs=2, shuffle=False, **validation, **options)
    logs = model.evaluate(X[:21], Y[:21], return_dict=True, **options)
    outputs = model.predict(X[:21], **options)
    return {**fit.history, **logs, "outputs": outputs}


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


@pytest.mark.parametrize("when", ["before", "inside", "between"])
def test_weights_are_those_of_one_device(when, autolog):
    reference, model = clipped(), clipped()
    wanted = use(reference)
    if when == "before":
        autolog()
    if when == "between":
        with kt.TowerStrategy(2):
            classifier().fit(X, Y, verbose=0)
            autolog()
    # Turned on in one block, it holds in others, and behind them.
    for _ in range(2):
        with kt.TowerStrategy(3):
            if when == "inside":
                autolog()
            with logged_once():
                found = use(model)
        assert_same_history(found, wanted, 1e-5)
        wanted = use(reference)
        assert_ordinary(model)
    assert_same_model(model, reference)
    with logged_once():
        use(model)


def test_the_logged_model_is_that_of_the_towers(autolog):
    model = classifier()
    autolog(log_models=True)
    with kt.TowerStrategy(2):
        model.fit(X, Y, verbose=0)
    (run,) = mlflow.search_runs(output_format="list")
    loaded = mlflow.tensorflow.load_model(f"runs:/{run.info.run_id}/model")
    assert isinstance(loaded, keras.Model)
    assert_all_close(loaded.weights, model.weights, 0)
