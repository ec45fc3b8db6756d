"""KerasTuner inside a block, or with the strategy as its own."""

import contextlib
import functools

import pytest

import keras_towers as kt
from keras_towers.inspection.conformance.outcomes import assert_ordinary
from tests.kit.compare import assert_close, assert_same_model
from tests.kit.training import X, Y, adam, classifier

keras_tuner = pytest.importorskip(
    "keras_tuner", reason="KerasTuner is not installed: make test-ecosystem"
)

FAILS = 0.3


def build(hyperparameters):
    clipnorm = hyperparameters.Choice("clipnorm", [0.1, 0.2, FAILS])
    if clipnorm == FAILS:
        raise ValueError("this trial fails")
    return classifier(optimizer=functools.partial(adam, clipnorm=clipnorm))


def search(folder, strategy=None):
    """A tuner that has searched; the status and score of each trial."""
    tuner = keras_tuner.RandomSearch(
        build,
        objective="val_loss",
        max_trials=3,
        seed=1,
        directory=folder,
        distribution_strategy=strategy,
        max_consecutive_failed_trials=3,
    )
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    tuner.search(X, Y, validation_data=(X[:11], Y[:11]), **options)
    results = {
        trial.hyperparameters.values["clipnorm"]: (trial.status, trial.score)
        for trial in tuner.oracle.trials.values()
    }
    assert results.pop(FAILS) == ("FAILED", None)
    assert all(status == "COMPLETED" for status, _ in results.values())
    return tuner, results


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The results and the best model of one device."""
    tuner, results = search(tmp_path_factory.mktemp("plain"))
    assert len(results) == 2
    (best,) = tuner.get_best_models()
    return results, best


def outputs(model):
    data = {"x": X, "verbose": 0}
    return [*model.predict(**data).flat, *model.evaluate(y=Y, **data)]


@pytest.mark.parametrize("of_tuner", [False, True])
def test_search(of_tuner, reference, tmp_path):
    wanted, best = reference
    strategy = kt.TowerStrategy(2)
    with contextlib.nullcontext() if of_tuner else strategy:
        tuner, results = search(tmp_path, strategy if of_tuner else None)
    assert results.keys() == wanted.keys()
    for name, (_, score) in wanted.items():
        assert_close(results[name][1], score)
    with strategy:
        (inside,) = tuner.get_best_models()
        assert_close(outputs(inside), outputs(best), 1e-5)
    (outside,) = tuner.get_best_models()
    assert_close(outputs(outside), outputs(best), 1e-5)
    assert_ordinary(inside, trains_on_towers=True)
    assert_same_model(inside, best)
