"""``step/device_memory.py``: what does not fit is refused before it runs."""

import logging

import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.step.plan.device_memory import DoesNotFit
from tests.fit.step.sized_models import data_of, deep, fit, wide


def refused(model, strategy, call=fit):
    """The message with which a call is refused; nothing has changed."""
    before = [v.numpy() for v in model.variables]
    with strategy, pytest.raises(DoesNotFit) as caught:
        call(model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    return str(caught.value)


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
