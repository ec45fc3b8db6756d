"""A worker: the exactness contract over ranks, of one tower each or of two."""

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_towers as kt
from tests.exactness import compare
from tests.exactness.cases import CASES
from tests.processes import checks


def trains_as_one_device(name, towers):
    """Weights, optimizer, ``History``: of one device, and on all ranks."""
    model = CASES[name].build()
    with kt.HorovodStrategy(towers=towers) as strategy:
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
    checks.CHECKS[case] = functools.partial(trains_as_one_device, case, 1)
    checks.CHECKS[f"{case} on two towers"] = functools.partial(
        trains_as_one_device, case, 2
    )

if __name__ == "__main__":
    kt.virtual_towers(2)
    checks.main()
