"""Gradients are exchanges of a step, which only a strategy's sums add up."""

import keras
import numpy as np
import pytest

from keras_towers import devices as devices_lib
from keras_towers.fit.options import StrategyOptions
from keras_towers.fit.step.tower_program import TowerProgram
from keras_towers.fit.update.weight_update import WeightUpdate
from keras_towers.reduction import sum_on_host
from keras_towers.strategies.base import BaseStrategy
from tests.kit.compare import assert_exact
from tests.kit.training import fit, linear


@pytest.fixture
def programs(monkeypatch):
    """The programs that are added to graphs."""
    found, add_to_graph = [], TowerProgram.add_to_graph

    def add(program, *args):
        found.append(program._program)
        return add_to_graph(program, *args)

    monkeypatch.setattr(TowerProgram, "add_to_graph", add)
    return found


class Counted(BaseStrategy):
    """Two towers that note what their sums get."""

    def __init__(self, each):
        super().__init__(devices_lib.devices_of(2), StrategyOptions())
        self.summed = []
        self._compose(WeightUpdate(self._config, self._sum, each))

    def _sum(self, grads, devices):
        self.summed.append([[tuple(g.shape) for g in own] for own in grads])
        return sum_on_host(grads, devices)


@pytest.mark.parametrize("each", [False, True])
def test_whole_gradients_are_added_up_in_one_round(programs, each):
    def make():
        keras.utils.set_random_seed(1)
        # Gradients behind its statistics are computed in an earlier level.
        normed = keras.layers.BatchNormalization(center=False, scale=False)
        return linear(keras.layers.Dense(5), normed)

    strategy = Counted(each)
    assert_exact(make, fit, strategy)
    shapes = [tuple(w.shape) for w in make().trainable_weights]
    program, *_ = programs
    exchanges = [e for e in program.exchanges if e.gradient]
    assert len({e.level for e in exchanges}) == 1 < program.levels - 1
    assert all(e.is_own == each for e in exchanges)
    assert sorted(tuple(e.given.shape) for e in exchanges) == sorted(shapes)
    for of_towers in strategy.summed:
        assert [sorted(own) for own in of_towers] == [sorted(shapes)] * 2
    # Nothing else adds up what is as large as a weight.
    others = [e for e in program.exchanges if e.kind == "sum"]
    others = [e for e in others if not e.gradient]
    largest = max(np.prod(shape) for shape in shapes)
    assert all((e.given.shape.num_elements() or 0) < largest for e in others)
