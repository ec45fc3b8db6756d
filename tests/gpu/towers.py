"""The towers of tests for GPUs, and strategies on them."""

import contextlib
import dataclasses
import functools

import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance.cases import CASES, HARDEST
from keras_towers.inspection.conformance.strategy_check import compare
from keras_towers.reduction.collective_ops import nccl_available
from tests.kit import gpus
from tests.kit.training import prefetching

# Sums over blocks of threads, and what XLA fuses, are rounded in another order
# than on one device; a wrong share of one example is a hundred times more.
TOLERANCE = 5e-5

# What reductions of every kind have to get right.
HARD = (*HARDEST, "uneven", "loss-scale-overflow", "mixed-float16")

# What strategies choose on GPUs.
_ON_GPUS = {"mode": "towers", "updates": "each", "packer": True}


@functools.cache
def towers():
    """The names of all towers, such as ``"/device:GPU:1"``."""
    names = [d.name for d in tf.config.list_logical_devices(gpus.KIND.upper())]
    names = names if gpus.ON else names[: gpus.PARTS]
    return tuple(name[name.index("/device") :] for name in names)


def some_on_cpus(kept, cases):
    """Cases of which CPUs run those that only these tests show.

    Args:
        kept: whether they run a case.
        cases: of ``pytest.mark.parametrize``.
    """
    return [case for case in cases if gpus.ON or kept(case)]


def skip_unless_possible(name):
    """Skip a test where a mode, or a reduction of that name, cannot run."""
    available, reason = nccl_available(towers())
    if "nccl" in name and not available:
        pytest.skip(f"NCCL: {reason}")
    if name == "hierarchical" and len(towers()) % 2:
        pytest.skip(f"{len(towers())} GPUs are no two equal groups")


def strategy(make=kt.TowerStrategy, number=None, **options):
    """A strategy on all towers, or the first ones.

    On logical CPUs it does what it would do on GPUs. The test is skipped where
    its mode cannot run.
    """
    mode = options.get("mode")
    skip_unless_possible(mode or "")
    if gpus.KIND == "cpu" and make is kt.TowerStrategy:
        options = {**_ON_GPUS, **options}
    as_on_gpus = prefetching if gpus.KIND == "cpu" else contextlib.nullcontext
    with as_on_gpus():
        made = make(list(towers()[:number]), **options)
    assert mode in (None, made.mode)
    return made


def assert_contract(name, on):
    """Assert that a case trains on towers as on one GPU."""
    case = CASES[name]
    limit = max(case.tolerance, TOLERANCE)
    compare(dataclasses.replace(case, in_graph=True), on, limit)
