"""Which stage of a model follows which, and where a model is in a block."""

import gc
import itertools

import keras
import pytest

import keras_towers as kt
from keras_towers.fit.weights.model_binding import ModelStage, ModelStages
from keras_towers.inspection.conformance import case_models as m
from tests.kit.training import fit, linear

# From each stage, in the order of ModelStage: 1 where a model may go.
ALLOWED = {
    ModelStage.FREE: (1, 1, 1, 1, 0, 0),
    ModelStage.COMPILED: (1, 1, 0, 1, 0, 0),
    ModelStage.CREATED: (1, 0, 1, 1, 0, 0),
    ModelStage.CLAIMED: (1, 0, 0, 1, 1, 0),
    ModelStage.PLACED: (1, 0, 0, 0, 1, 1),
    ModelStage.APART: (1, 0, 0, 0, 1, 1),
}
WAYS = {
    ModelStage.FREE: (),
    ModelStage.COMPILED: (ModelStage.COMPILED,),
    ModelStage.CREATED: (ModelStage.CREATED,),
    ModelStage.CLAIMED: (ModelStage.CLAIMED,),
    ModelStage.PLACED: (ModelStage.CLAIMED, ModelStage.PLACED),
    ModelStage.APART: (ModelStage.CLAIMED, ModelStage.PLACED, ModelStage.APART),
}


@pytest.mark.parametrize(
    ("before", "after"), [*itertools.product(ModelStage, ModelStage)], ids=str
)
def test_transitions(before, after):
    model, stages = keras.Model(name="mine"), ModelStages()
    for stage in WAYS[before]:
        stages.move(model, stage)
    if ALLOWED[before][[*ModelStage].index(after)]:
        stages.move(model, after)
        assert stages.of(model) is after
        return
    said = f"'mine' cannot go from stage {before.name} to {after.name}: it is "
    with pytest.raises(AssertionError, match=said + before.value):
        stages.move(model, after)
    assert stages.of(model) is before


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
