"""Sums of gradients on GPUs, of every kind that gradients are of."""

import pytest

from keras_towers import reduction
from tests.gpu.towers import skip_unless_possible, towers
from tests.reduction.cases import (
    assert_placed,
    assert_sums,
    compiled,
    make_gradients,
)

pytestmark = pytest.mark.gpu

REDUCTIONS = {
    "host": lambda: reduction.sum_on_host,
    "towers": lambda: reduction.sum_on_towers,
    "hierarchical": lambda: reduction.hierarchical_all_reduce,
    "nccl": lambda: reduction.nccl_all_reduce,
    "collective": lambda: reduction.CollectiveAllReduce(towers()),
}


@pytest.fixture(params=REDUCTIONS)
def reduce(request):
    skip_unless_possible(request.param)
    return REDUCTIONS[request.param]()


def test_every_tower_gets_the_sum_on_its_device(reduce):
    packer = reduction.GradientPacker(num_split=3, min_elements=2)
    for function in (reduce, reduction.PackedReduction(reduce, packer)):
        step = compiled(function, towers())
        for seed in range(3):
            grads = make_gradients(len(towers()), seed)
            assert_sums(step(grads), grads)
    results = reduce(grads, towers())
    assert_sums(results, grads)
    assert_placed(results, towers())
