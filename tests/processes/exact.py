"""A worker: the exactness contract over ranks, of one tower each or of two."""

import dataclasses
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import keras_towers as kt
from tests.exactness import models as m
from tests.exactness.cases import CASES
from tests.exactness.contract import on_one_device
from tests.kit.compare import assert_same, outcome
from tests.kit.ranks import CHECKS, main
from tests.kit.training import compiled
from tests.processes.small import Strategy


def without_metrics(result):
    """Leave out what metrics have counted: every rank has its own part."""
    own = {
        variable.path
        for metric in result.model.metrics
        for variable in metric.variables
    }
    values = [(path, value) for path, value in result.values if path not in own]
    return dataclasses.replace(result, values=values)


def trains_as_one_device(name, towers, **options):
    """Weights, optimizer, ``History``: of one device, and on all ranks."""
    strategy = Strategy(towers=towers, **options)
    assert_one_device(CASES[name], lambda: on_one_device(name), strategy)


def batch_norm_of_the_global_batch():
    """Layers that are not synchronized, on two towers of each rank."""
    case = dataclasses.replace(
        CASES["sync-batch-norm"],
        build=compiled(
            lambda: m.mlp(keras.layers.BatchNormalization()),
            lambda: keras.optimizers.Adam(0.01),
        ),
    )
    strategy = Strategy(towers=2, batch_norm="global")
    reference = functools.partial(outcome, case.build, case.fit)
    assert_one_device(case, reference, strategy)


def assert_one_device(case, reference, strategy):
    found = without_metrics(outcome(case.build, case.fit, strategy))
    if strategy.is_chief:  # The others have the same, to the bit.
        wanted = without_metrics(reference())
        assert_same(found, wanted, case.tolerance)
    everything = [
        *(value.tobytes() for _, value in found.values),
        repr(found.returned),
    ]
    first, *others = strategy._config.transport.gather_objects(everything)
    for rank, other in enumerate(others, 1):
        assert other == first, f"rank {rank} differs from rank 0"


for case in CASES:
    CHECKS[f"{case} in shares"] = functools.partial(
        trains_as_one_device, case, 1, updates="sharded"
    )
    CHECKS[case] = functools.partial(trains_as_one_device, case, 1)
    CHECKS[f"{case} on two towers"] = functools.partial(
        trains_as_one_device, case, 2
    )

CHECKS["embedding-clipped in shares of two towers"] = functools.partial(
    trains_as_one_device, "embedding-clipped", 2, updates="sharded"
)
CHECKS["batch-norm of the global batch"] = batch_norm_of_the_global_batch

if __name__ == "__main__":
    kt.virtual_towers(2)
    main()
