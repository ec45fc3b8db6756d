"""A worker: the exactness contract over ranks, with the towers of argv."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_towers as kt
from tests.exactness import compare
from tests.exactness.cases import CASES
from tests.processes import checks

TOWERS = int(sys.argv.pop(1))


def trains_as_one_device(name):
    """Weights, optimizer, ``History``: of one device, and on all ranks."""
    model = CASES[name].build()
    with kt.HorovodStrategy(towers=TOWERS) as strategy:
        history = CASES[name].fit(model)
        compare.assert_towers_equal(model)
    result = compare.result(model, history)
    if strategy.is_chief:  # The others have the same, to the bit.
        compare.assert_same(name, result)
    everything = [
        *(value.tobytes() for value in result.weights.values()),
        *(value.tobytes() for value in result.optimizer),
        repr(history.history),
    ]
    first, *others = strategy.transport.gather_objects(everything)
    for rank, other in enumerate(others, 1):
        assert other == first, f"rank {rank} differs from rank 0"


for case in CASES:
    checks.CHECKS[case] = lambda case=case: trains_as_one_device(case)

if __name__ == "__main__":
    if TOWERS > 1:
        kt.virtual_towers(TOWERS)
    checks.main()
