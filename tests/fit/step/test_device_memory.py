"""``step/device_memory.py``: what does not fit is refused before it runs."""

import itertools
import logging
import re
from collections import Counter

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers._bytes import parse_bytes
from keras_towers.fit.step import step_reports
from keras_towers.fit.step.device_memory import DoesNotFit
from keras_towers.settings import ENV_DEVICE_MEMORY
from tests.kit.compare import assert_all_close

RANDOM = np.random.default_rng(0)


def made(layers, optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    first, *sizes = layers
    dense = [keras.layers.Dense(size, "relu") for size in sizes]
    model = keras.Sequential([keras.Input((first,)), *dense], name="mine")
    model.compile(optimizer, "mse", **{"jit_compile": False, **options})
    return model


def wide(*optimizer, **options):
    """Large weights: 1.71 MB."""
    return made((256, 512, 512, 64), *optimizer, **options)


def deep(*optimizer, **options):
    """Large activations: 524 KB of each of 4 layers, for 2048 examples."""
    return made((64, 64, 64, 64, 64), *optimizer, **options)


def data_of(model, examples=64):
    shapes = model.input_shape[1:], model.output_shape[1:]
    return [
        RANDOM.random((examples, *shape), dtype="float32") for shape in shapes
    ]


def strategy_costs(strategy):
    """The bytes that steps are planned to need, with variables."""
    held = strategy._adoption.held_bytes().values()
    variables = max(sum(map(Counter, held), Counter()).values())
    steps = step_reports._costs[strategy].values()
    return [variables + costs.plan.bytes for costs in steps]


def fit(model, examples=64):
    x, y = data_of(model, examples)
    return model.fit(x, y, batch_size=examples, verbose=0)


def refused(model, strategy, call=fit):
    """The message with which a call is refused; nothing has changed."""
    before = [v.numpy() for v in model.variables]
    with strategy, pytest.raises(DoesNotFit) as caught:
        call(model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    return str(caught.value)


@pytest.fixture
def limit(monkeypatch):
    def give(text):
        monkeypatch.setenv(ENV_DEVICE_MEMORY, text)

    return give


def test_variables_are_refused_before_they_are_placed(limit):
    limit("4MB")
    model = wide()
    whole = kt.TowerStrategy(4, weights="whole", updates="once")
    said = refused(model, whole)
    assert said.startswith(
        "fit of model 'mine' does not fit into memory: /device:CPU:0 has 4 MB, "
        "and it needs at least 5.12 MB (1.71 MB of weights, 3.42 MB of "
        "optimizer state), which is 1.12 MB too much. Try leaving "
        "weights='whole' and updates='once' out, more devices or a smaller"
    )
    assert not model.optimizer.built
    # So it does, on the same devices, and with the same model.
    with kt.TowerStrategy(4, weights="sharded"):
        fit(model)
    # An evaluation needs no slots.
    other = wide()
    with kt.TowerStrategy(4):
        other.evaluate(*data_of(other), verbose=0)


def test_a_step_is_refused_before_it_runs(limit):
    limit("2MB")
    model = deep()
    strategy = kt.TowerStrategy(2, remat=False, micro_batches=1)
    said = refused(model, strategy, lambda m: fit(m, 4096))
    assert "while a step runs" in said
    assert "Try leaving remat=False and micro_batches=1 out, more" in said
    with kt.TowerStrategy(2, micro_batches=4):
        fit(model, 4096)
    limit("1MB")
    with pytest.raises(DoesNotFit), kt.TowerStrategy(2, micro_batches=4):
        fit(model, 4096)
    # Without options, more parts do.
    limit("1.6MB")
    with kt.TowerStrategy(2):
        fit(model, 4096)


@pytest.mark.alternate
@pytest.mark.parametrize("options", [{"micro_batches": "auto"}, {}])
def test_what_may_run_all_the_same_is_not_refused(limit, options, caplog):
    limit("2MB")
    model = deep(jit_compile=not options)
    with caplog.at_level(logging.WARNING), kt.TowerStrategy(2, **options):
        fit(model, 4096)
        fit(model, 4096)
    assert caplog.text.count("may not fit into memory") == (not options)


@pytest.mark.parametrize(
    ("size", "options", "said"),
    [
        ("3.3MB", {"micro_batches": 1}, "operations again"),
        ("3.3MB", {}, "processes a tower's rows in 2 parts: /device:CPU:0 has"),
        ("2MB", {}, "processes a tower's rows in 8 parts: /device:CPU:0 has"),
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


@pytest.mark.parametrize(
    ("make", "examples", "sizes"),
    [
        (wide, 64, ("1GB", "6.5MB", "5.6MB", "4.8MB", "4MB", "3.5MB")),
        (deep, 2048, ("1GB", "2MB", "1.6MB", "1.2MB", "1MB", "800KB")),
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


def test_other_models_of_the_block_count(limit):
    limit("9MB")
    first, second = wide(), wide()
    with kt.TowerStrategy(2) as strategy:
        fit(first)
        assert strategy.updates == "once"
        fit(second)
        assert strategy.updates == "sharded"
        assert "_in_shards" not in strategy.describe()
    whole = {"weights": "whole", "updates": "once"}
    with kt.TowerStrategy(2, **whole), pytest.raises(DoesNotFit) as caught:
        fit(first)
        fit(second)
    assert " of other models), which is " in str(caught.value)


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
    by_hand = [least(micro_batches=n, remat=True) for n in (1, 2, 4, 8, 16)]
    limit(f"{int(min(by_hand) * 1.3)}B")
    assert least() <= 1.3 * min(by_hand)


@pytest.mark.parametrize("kind", ["arrays", "generator"])
def test_numbers_are_said_only_where_sizes_are_known(kind, limit, capfd):
    limit("4.4MB")
    model = wide()
    x, y = data_of(model)
    with kt.TowerStrategy(2):
        if kind == "arrays":
            model.fit(x, y, batch_size=64, verbose=0)
        else:
            data = ((x, y) for _ in range(2))
            model.fit(data, steps_per_epoch=1, verbose=0)
    said = capfd.readouterr().err
    assert "variables in shards: /device:CPU:0 has 4.4 MB" in said, said
    assert (", and it needs " in said) == (kind == "arrays"), said


def test_an_update_that_is_given_is_kept(limit):
    limit("4MB")
    said = refused(wide(), kt.TowerStrategy(2, updates="each"))
    assert "Try leaving updates='each' out" in said


@pytest.mark.parametrize("size", ["5.6MB", "4.8MB", "4MB"])
def test_compiled_steps_fit_as_well(size, limit, capfd):
    limit(size)
    with kt.TowerStrategy(2) as strategy:
        fit(wide(jit_compile=True))
    said = capfd.readouterr().err
    assert "shards" in said and "may not" not in said, strategy.describe()


def test_within_a_tenth_it_is_a_warning(limit, caplog):
    options = {"weights": "whole", "updates": "once", "micro_batches": 1}
    for text in ("10MB", "7.2MB"):
        limit(text)
        model = wide()
        strategy = kt.TowerStrategy(2, **options)
        with caplog.at_level(logging.WARNING), strategy:
            fit(model)
            fit(model)
    assert caplog.text.count("may not fit into memory") == 1
    assert "/device:CPU:0 has 7.2 MB, and it needs about 7." in caplog.text
    limit("6MB")
    with pytest.raises(DoesNotFit), kt.TowerStrategy(2, **options):
        fit(wide())


@pytest.mark.alternate
def test_where_a_strategy_places_weights_itself_nothing_is_compared(limit):
    limit("1MB")
    for strategy in (
        kt.ParameterServerTowerStrategy(4),
        kt.AsyncTowerStrategy(2),
    ):
        with strategy:
            fit(wide())


def test_a_limit_of_0_is_none(limit):
    limit("100KB")
    said = refused(wide(), kt.TowerStrategy(2, weights="sharded"))
    assert "Try more devices or a smaller batch; `keras-towers plan`" in said
    limit("0")
    with kt.TowerStrategy(2):
        fit(wide())
