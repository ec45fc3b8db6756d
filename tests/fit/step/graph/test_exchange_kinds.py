"""Gradients are exchanges of a step, which only a strategy's sums add up."""

import keras
import numpy as np
import pytest

import keras_towers as kt
from keras_towers.fit.options import StrategyOptions
from keras_towers.fit.update.sharding_policy import OnEachTower, ShardingPolicy
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.reduction.collectives import OnDevice
from keras_towers.strategies.base import BaseStrategy
from keras_towers.transport import devices as devices_lib
from tests.kit.compare import assert_exact
from tests.kit.training import fit, linear


class Noted(OnDevice):
    """Sums on the host, and notes the shapes of what has one."""

    def __init__(self, summed):
        super().__init__()
        self.summed = summed

    def all_reduce(self, grads, devices):
        shapes = [[tuple(g.shape) for g in own if g.shape] for own in grads]
        self.summed.append(shapes)
        return super().all_reduce(grads, devices)


class Counted(BaseStrategy):
    """Two towers that note what their sums get."""

    def __init__(self, each):
        super().__init__(devices_lib.devices_of(2), StrategyOptions())
        self.summed = []
        kind = OnEachTower if each else ShardingPolicy
        noted = Noted(self.summed)
        self._compose(WeightUpdate(self._config, kind(self._config), noted))


@pytest.mark.parametrize("each", [False, True])
def test_whole_gradients_are_added_up_in_one_round(timelines, each):
    def make():
        keras.utils.set_random_seed(1)
        # Gradients behind its statistics are computed in an earlier level.
        normed = keras.layers.BatchNormalization(center=False, scale=False)
        return linear(keras.layers.Dense(5), normed)

    strategy = Counted(each)
    assert_exact(make, fit, strategy)
    shapes = [tuple(w.shape) for w in make().trainable_weights]
    timeline, *_ = timelines
    program, levels = timeline.program, timeline.levels
    exchanges = [e for e in program.exchanges if e.gradient]
    number = len({levels[e] for e in exchanges})
    assert number == 1 < timeline.number_of_levels - 1
    assert all(e.is_own == each for e in exchanges)
    assert sorted(tuple(e.given.shape) for e in exchanges) == sorted(shapes)
    summed = [[sorted(own) for own in calls] for calls in strategy.summed]
    assert [sorted(shapes)] * 2 in summed
    # Nothing else adds up what is as large as a weight.
    others = [e for e in program.exchanges if e.kind == "sum"]
    others = [e for e in others if not e.gradient]
    largest = max(np.prod(shape) for shape in shapes)
    assert all((e.given.shape.num_elements() or 0) < largest for e in others)


def test_rows_are_updated_as_their_gradients_arrive(timelines):
    # Otherwise what Adam computes for all weights is in memory at a time.
    keras.utils.set_random_seed(1)
    width, number = 160, 4
    layers = [keras.layers.Dense(width, "tanh") for _ in range(number)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(keras.optimizers.Adam(), "mse")
    x = np.ones((64, width), "float32")
    one_weight = 4 * width**2
    with kt.TowerStrategy(2, weights="sharded", gather_bytes=one_weight):
        model.fit(x, x, batch_size=64, verbose=0)
    timeline, *_ = timelines
    levels = {
        timeline.levels[operation]
        for operation in timeline.program.operations
        if "towers" in operation.axes and operation.type.startswith("Assign")
    }
    # The last layer's gradient needs no weight: it may arrive with another.
    assert len(levels) >= number - 1
