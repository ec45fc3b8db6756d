"""Checks of a worker: the exactness contract over ranks and their towers."""

import dataclasses
import functools

from keras_towers.conformance.cases import CASES
from keras_towers.fit.weights import shards
from tests.exactness.contract import on_one_device
from tests.kit.compare import assert_same, use_model
from tests.kit.ranks import CHECKS
from tests.processes.small import Strategy

# The models are small.
shards.SMALLEST_BYTES = 1
# Workers of parameter servers count for themselves, and know what they have
# computed; they validate all together.
SERVED = Strategy.__name__ not in (
    "HorovodStrategy",
    "BytePSStrategy",
    "MultiWorkerTowerStrategy",
)


def comparable(result):
    """Leave out what workers of parameter servers count for themselves."""
    if not SERVED:
        return result
    own = {
        variable.path
        for metric in result.model.metrics
        for variable in metric.variables
    }
    values = [(path, value) for path, value in result.values if path not in own]
    returned = {k: v for k, v in result.returned.items() if "val_" in k}
    return dataclasses.replace(result, values=values, returned=returned)


def assert_one_device(case, reference, strategy):
    """Weights, optimizer, ``History``: of one device, and on all ranks.

    Returns:
        the outcome on this rank.
    """
    together = strategy._config.job
    try:
        found = comparable(use_model(case.build, case.fit, strategy))
    except BaseException:
        # The others would take what the next check tells for this one's.
        together.gather_objects("failed")
        raise
    # By order: names count the models that a rank has made.
    everything = [value.tobytes() for _, value in found.values]
    if not SERVED:
        everything.append(repr(found.returned))
    first, *others = together.gather_objects(everything)
    for rank, other in enumerate(others, 1):
        assert other == first, f"rank {rank} differs from rank 0"
    if strategy.is_chief:  # The others have the same, to the bit.
        assert_same(found, comparable(reference()), case.tolerance)
    return found


def trains_as_one_device(name, towers, **options):
    strategy = Strategy(towers=towers, **options)
    assert_one_device(CASES[name], lambda: on_one_device(name), strategy)


for case in CASES:
    for name, towers, options in (
        ("", 1, {}),
        (" on two towers", 2, {}),
        (" in shares", 1, {"updates": "sharded"}),
        (" in shares of two towers", 2, {"updates": "sharded"}),
        (" with weights in shards", 1, {"weights": "sharded"}),
        (" with weights in shards of two towers", 2, {"weights": "sharded"}),
    ):
        CHECKS[f"{case}{name}"] = functools.partial(
            trains_as_one_device, case, towers, **options
        )

CHECKS["micro-batches on two towers"] = functools.partial(
    trains_as_one_device, "sync-batch-norm", 2, micro_batches=3
)
