"""Checks of a worker: the exactness contract over ranks and their towers."""

import dataclasses
import functools

from keras_towers.fit.weights import shards
from keras_towers.inspection.conformance.cases import CASES
from keras_towers.inspection.conformance.strategy_check import compare
from tests.exactness.ways import OF_RANKS
from tests.kit.ranks import CHECKS
from tests.processes.small import Strategy

# The models are small.
shards.SMALLEST_BYTES = 1


def of_workers(result):
    """Leave out what workers of parameter servers count for themselves.

    They know what they have computed, and validate all together.
    """
    own = {
        variable.path
        for metric in result.model.metrics
        for variable in metric.variables
    }
    values = [(path, value) for path, value in result.values if path not in own]
    returned = {k: v for k, v in result.returned.items() if "val_" in k}
    return dataclasses.replace(result, values=values, returned=returned)


_SYNCHRONOUS = "HorovodStrategy", "BytePSStrategy", "MultiWorkerTowerStrategy"
COMPARABLE = None if Strategy.__name__ in _SYNCHRONOUS else of_workers


def assert_one_device(case, **options):
    """Weights, optimizer, ``History``: of one device, and on all ranks.

    Returns:
        the outcome on this rank.
    """
    return compare(case, Strategy(**options), comparable=COMPARABLE)


for name, case in CASES.items():
    for way, options in OF_RANKS.items():
        CHECKS[f"{name}{way}"] = functools.partial(
            assert_one_device, case, **options
        )
