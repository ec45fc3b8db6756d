"""KerasTuner inside a block, or with the strategy as its own."""

import functools

import keras
import pytest

import keras_towers as kt
from tests.kit.compare import close, same_model
from tests.kit.ordinary import assert_ordinary
from tests.kit.training import X, Y, adam, classifier

keras_tuner = pytest.importorskip(
    "keras_tuner", reason="KerasTuner is not installed: make test-ecosystem"
)

STRATEGIES = [kt.TowerStrategy, kt.ParameterServerTowerStrategy]
FAILS = 0.3


def build(hyperparameters):
    clipnorm = hyperparameters.Choice("clipnorm", [0.1, 0.2, FAILS])
    if clipnorm == FAILS:
        raise ValueError("this trial fails")
    return classifier(optimizer=functools.partial(adam, clipnorm=clipnorm))


def tuner(folder, strategy=None):
    return keras_tuner.RandomSearch(
        build,
        objective="val_loss",
        max_trials=3,
        seed=1,
        directory=folder,
        distribution_strategy=strategy,
        max_consecutive_failed_trials=3,
    )


def search(found):
    found.search(
        X[:53],
        Y[:53],
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(X[:11], Y[:11]),
    )
    return {
        trial.hyperparameters.values["clipnorm"]: (trial.status, trial.score)
        for trial in found.oracle.trials.values()
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The results and the best model of one device."""
    plain = tuner(tmp_path_factory.mktemp("plain"))
    results = search(plain)
    assert results[FAILS] == ("FAILED", None) and len(results) == 3
    (best,) = plain.get_best_models()
    return results, best


def assert_same_results(found, reference):
    assert found.keys() == reference.keys()
    for name, (status, score) in reference.items():
        assert found[name][0] == status
        if score is not None:
            close(found[name][1], score)


def assert_same_outputs(model, reference):
    close(model.predict(X, verbose=0), reference.predict(X, verbose=0), 1e-5)
    close(model.evaluate(X, Y, verbose=0), reference.evaluate(X, Y, verbose=0))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_search_inside_a_block(strategy, reference, tmp_path):
    results, best = reference
    mine = tuner(tmp_path)
    with strategy(2):
        assert_same_results(search(mine), results)
        (inside,) = mine.get_best_models()
        assert_same_outputs(inside, best)
    (after,) = mine.get_best_models()
    for model in (inside, after):
        assert_ordinary(model)
        assert_same_outputs(model, best)
        same_model(model, best)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_of_the_tuner(strategy, reference, tmp_path):
    results, best = reference
    towers = strategy(2)
    mine = tuner(tmp_path, towers)
    assert_same_results(search(mine), results)
    (outside,) = mine.get_best_models()
    assert_same_outputs(outside, best)
    with towers:
        (inside,) = mine.get_best_models()
        assert_same_outputs(inside, best)
    assert_ordinary(inside)
    keras.utils.clear_session()


def test_asynchronous_towers(tmp_path):
    with kt.AsyncTowerStrategy(2):
        found = search(tuner(tmp_path))
    assert found.pop(FAILS) == ("FAILED", None)
    assert all(status == "COMPLETED" for status, _ in found.values())
