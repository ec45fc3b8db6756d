"""Which stage of a model follows which, and where a model is in a block."""

import gc

import keras
import pytest

import keras_towers as kt
from keras_towers.fit.weights.model_binding import ModelStage, ModelStages
from keras_towers.inspection.conformance import case_models as m
from tests.kit.training import fit, linear


def test_a_stage_that_does_not_follow_is_refused():
    model, stages = keras.Model(name="mine"), ModelStages()
    stages.move(model, ModelStage.CREATED)
    said = "'mine' cannot go from stage CREATED to APART: it is created in the"
    with pytest.raises(AssertionError, match=said):
        stages.move(model, ModelStage.APART)
    assert stages.of(model) is ModelStage.CREATED


def test_a_model_that_is_dropped_is_freed():
    stages = ModelStages()
    stages.move(keras.Sequential(), ModelStage.CREATED)
    gc.collect()
    assert not stages.at(*ModelStage)


def test_the_way_of_models_in_a_block():
    compiled, used, nested = linear(), linear(), linear()
    outer = keras.Sequential([keras.Input((6,)), nested])
    strategy = kt.TowerStrategy(2)
    of = strategy._adoption.stages.of
    with strategy:
        created = linear()
        for model in (compiled, used, outer):
            model.compile(m.momentum(), m.cross_entropy())
        stages = [of(m) for m in (created, compiled, used, outer, nested)]
        first = [
            ModelStage.CREATED,
            *[ModelStage.COMPILED] * 3,
            ModelStage.FREE,
        ]
        assert stages == first
        fit(used)
        fit(created)
        strategy.adopt(outer)
        assert of(used) is of(created) is of(outer) is ModelStage.PLACED
        assert of(nested) is ModelStage.CLAIMED
    assert not strategy._adoption.stages.at(*ModelStage)
