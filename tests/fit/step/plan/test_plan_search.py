"""``step/plan_search.py``: the cheapest plan that fits is taken."""

import itertools
import logging
import re

import keras
import pytest

import keras_towers as kt
from keras_towers.fit.step.plan.device_memory import DoesNotFit
from keras_towers.foundation.byte_sizes import parse_bytes
from tests.fit.step.sized_models import (
    data_of,
    deep,
    fit,
    strategy_costs,
    wide,
)
from tests.kit.compare import assert_all_close
from tests.kit.sampling import sample_of


@pytest.mark.parametrize(
    ("size", "options", "said"),
    [
        ("3.3MB", {"micro_batches": 1}, "operations again"),
        ("3.3MB", {}, "processes a tower's rows in 2 parts: /device:CPU:0 has"),
        ("2MB", {}, "processes a tower's rows in 8 parts: /device:CPU:0 has"),
        ("2MB", {"remat": False}, "MB, and does not fit"),
    ],
)
def test_the_cheapest_plan_that_fits_is_chosen(
    limit, size, options, said, caplog
):
    caplog.set_level(logging.INFO)
    strategy = kt.TowerStrategy(2, **options)
    limit(size)
    with strategy:
        fit(deep(), 4096)
    assert said in caplog.text, caplog.text
    assert said in strategy.describe()
    limit("40KB")
    with strategy, pytest.raises(DoesNotFit):
        fit(deep(), 4096)


@pytest.mark.alternate
@pytest.mark.parametrize(
    ("make", "examples", "sizes"),
    [
        (wide, 64, ("1GB", "6.5MB", "5.6MB", "4.8MB", "4MB")),
        (deep, 2048, ("1GB", "2MB", "1.6MB", "1.2MB")),
    ],
)
def test_a_smaller_limit_never_needs_more_memory(limit, make, examples, sizes):
    """And all plans that fit give the same weights."""
    needed, wanted, data = [], None, data_of(make(), examples)
    for size in sizes:
        limit(size)
        adam = keras.optimizers.Adam(epsilon=1.0)
        model, strategy = make(adam), kt.TowerStrategy(2)
        try:
            with strategy:
                model.fit(*data, batch_size=examples, epochs=2, verbose=0)
        except DoesNotFit:
            break
        wanted = wanted or model.get_weights()
        assert_all_close(model.get_weights(), wanted)
        said = re.search(r"it needs (\S+ \S+)", strategy.describe())
        if said:
            needed.append(parse_bytes("needed", said[1].replace(" ", "")))
            assert needed[-1] <= 1.1 * parse_bytes("limit", size)
    assert len(needed) > 2
    for more, less in itertools.pairwise(needed):
        assert less <= 1.05 * more, needed


def test_batches_that_are_given_one_by_one_take_parts(limit, caplog):
    caplog.set_level(logging.INFO)
    limit("2MB")
    model, other = deep("sgd"), deep("sgd")
    x, y = data_of(model, 4096)
    with kt.TowerStrategy(2):
        model.train_on_batch(x, y)
        predicted = model.predict_on_batch(x)
    assert "train_on_batch of model 'mine' processes a tower's" in caplog.text
    other.train_on_batch(x, y)
    assert_all_close(model.get_weights(), other.get_weights())
    assert_all_close([predicted], [other.predict_on_batch(x)])


@pytest.mark.alternate
def test_more_parts_may_save_where_two_do_not(limit):
    """Sums of gradients, and what statistics need of all examples."""

    def made_with_statistics():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((64,))]
        for _ in range(3):
            layers += [
                keras.layers.Dense(64),
                keras.layers.BatchNormalization(),
            ]
            layers += [keras.layers.ReLU(), keras.layers.Dropout(0.1)]
        model = keras.Sequential([*layers, keras.layers.Dense(64)])
        model.compile("sgd", "mse", jit_compile=False)
        return model

    def least(**options):
        strategy = kt.TowerStrategy(2, **options)
        with strategy:
            fit(made_with_statistics(), 512)
        (planned,) = strategy_costs(strategy)
        return planned

    limit("1TB")
    by_hand = [least(micro_batches=n, remat=True) for n in (1, 4, 16)]
    limit(f"{int(min(by_hand) * 1.3)}B")
    assert least() <= 1.3 * min(by_hand)


@pytest.mark.parametrize("size", sample_of(["5.6MB", "4MB"]))
def test_compiled_steps_fit_as_well(size, limit, capfd):
    limit(size)
    with kt.TowerStrategy(2) as strategy:
        fit(wide(jit_compile=True))
    said = capfd.readouterr().err
    assert "shards" in said and "may not" not in said, strategy.describe()
