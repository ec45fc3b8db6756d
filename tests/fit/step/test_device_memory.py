"""``step/device_memory.py``: what does not fit is refused before it runs."""

import itertools
import logging
import re

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers._bytes import parse_bytes
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
        "and it needs 5.12 MB (1.71 MB of weights, 3.42 MB of optimizer "
        "state), which is 1.12 MB too much. Try leaving weights='whole' and "
        "updates='once' out, more devices or a smaller"
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
        said = re.search(r"it needs (\S+ \S+) instead", strategy.describe())
        if said:
            needed.append(parse_bytes("needed", said[1].replace(" ", "")))
            assert needed[-1] <= 1.1 * parse_bytes("limit", size)
    assert len(needed) > 2
    for more, less in itertools.pairwise(needed):
        assert less <= 1.05 * more, needed


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
