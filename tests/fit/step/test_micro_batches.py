"""Towers process their rows in parts, with the results of one device."""

import keras
import pytest

import keras_towers as kt
from keras_towers.fit.weights import shards
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_all_close, assert_exact, use_model
from tests.kit.sampling import sample_of
from tests.kit.training import adam, compiled, fit, stacked

pytestmark = pytest.mark.alternate

# The last batch has 5 rows: fewer than three towers have parts.
COUNT, BATCH = 31, 13
X, Y, TOKENS = m.FEATURES[:COUNT], m.LABELS[:COUNT], m.TOKENS[:COUNT]
Dense = keras.layers.Dense


def coupled():
    return [
        Dense(7, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.4, seed=2),
        Dense(3),
    ]


def clipped():
    return adam(global_clipnorm=0.1)


def trained(model):
    x = TOKENS if model.input_shape == (None, 4) else X
    return fit(model, 2, x, Y, BATCH)


def used(model):
    logs = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    return trained(model), logs, model.predict(X, BATCH, verbose=0)


@pytest.mark.parametrize("towers, parts", sample_of([(1, 3), (3, 2)]))
def test_batch_norm_dropout_and_clipping_see_the_whole_batch(towers, parts):
    strategy = kt.TowerStrategy(towers, micro_batches=parts)
    assert_exact(stacked(coupled, optimizer=clipped), used, strategy)


@pytest.mark.parametrize(
    "options",
    sample_of(
        [{"updates": "each"}, {"updates": "sharded"}, {"weights": "sharded"}], 3
    ),
)
def test_an_optimizer_computes_with_the_rows_of_all_parts(options, monkeypatch):
    """Before they are exchanged, which clipping would not allow."""
    monkeypatch.setattr(shards, "SMALLEST_BYTES", 1)
    strategy = kt.TowerStrategy(2, micro_batches=3, **options)
    assert_exact(compiled(m.with_embedding, adam), trained, strategy)


def test_parts_on_parameter_servers_and_without_averaging():
    strategy = kt.ParameterServerTowerStrategy(2, micro_batches=2)
    assert_exact(compiled(m.mlp), trained, strategy)

    def at(rate):
        return compiled(m.mlp, lambda: keras.optimizers.SGD(rate))

    strategy = kt.TowerStrategy(3, micro_batches=2, average=False)
    found = use_model(
        at(0.1), lambda model: fit(model, 1, X, Y, BATCH), strategy
    )
    wanted = use_model(at(0.3), lambda model: fit(model, 1, X, Y, BATCH))
    assert_all_close(found.model.weights, wanted.model.weights)


def test_fewer_rows_than_parts():
    def act(model):
        return [model.train_on_batch(X[:2], Y[:2]) for _ in range(3)]

    # Of two rows, BatchNormalization would enlarge roundings.
    def layers():
        return [keras.layers.Dropout(0.4, seed=2), Dense(3)]

    strategy = kt.TowerStrategy(1, micro_batches=4)
    assert_exact(stacked(layers), act, strategy, in_graph=True)


@pytest.mark.parametrize("couples", [False, True])
def test_describe_says_what_is_held_of_all_parts(couples):
    layers = coupled if couples else lambda: [Dense(7), Dense(3)]
    strategy = kt.TowerStrategy(1, micro_batches=2)
    with strategy:
        fit(stacked(layers)(), 1, X, Y, BATCH)
    described = strategy.describe()
    assert "each tower processes its rows in 2 parts" in described
    assert ("held for all micro-batches" in described) == couples
