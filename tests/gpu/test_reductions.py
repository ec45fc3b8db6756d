"""Exchanges on GPUs, of tensors of every kind."""

import pytest

from keras_towers.reduction.collective_ops import failure_of
from keras_towers.reduction.packing import GradientPacker, Packed
from keras_towers.strategies.modes import MODES
from tests.gpu.towers import skip_unless_possible, towers
from tests.reduction.cases import (
    assert_placed,
    assert_sums,
    compiled,
    make_gradients,
)

pytestmark = pytest.mark.gpu

PACKER = GradientPacker(num_split=3, min_elements=2)


@pytest.fixture(params=MODES)
def mode(request):
    skip_unless_possible(request.param)
    return MODES[request.param]()


def test_every_kind_of_exchange(mode):
    for collectives in (mode, Packed(mode, PACKER)):
        assert not failure_of(collectives, towers())


def test_every_tower_gets_the_sum_on_its_device(mode):
    reduce = mode.all_reduce
    for function in (reduce, Packed(mode, PACKER).all_reduce):
        step = compiled(function, towers())
        for seed in range(3):
            grads = make_gradients(len(towers()), seed)
            assert_sums(step(grads), grads)
    results = reduce(grads, towers())
    assert_sums(results, grads)
    assert_placed(results, towers())
