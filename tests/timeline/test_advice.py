"""What is advised where a phase stands out, and nothing where none does."""

import dataclasses
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.timeline.measured import Measured, source_of
from keras_towers.timeline.report import advise

pytestmark = pytest.mark.core

EVEN, SLOW = np.full(4, 0.08), np.array([0.08, 0.08, 0.16, 0.08])
PHASES = {"input": 0.001, "compute": 0.08, "wait": 0.002, "reduction": 0.008}
PHASES |= {"update": 0.006, "rest": 0.002, "callbacks": 0.001}
GOOD = Measured(
    PHASES,
    [f"tower {k}" for k in range(4)],
    of_towers={"compute": EVEN},
    options=tuple(inspect.signature(kt.TowerStrategy).parameters),
    cores=4,
    towers=4,
    traces=(1, 2.0),
)


def changed(phases=(), **facts):
    return dataclasses.replace(GOOD, phases=PHASES | dict(phases), **facts)


def of_input(source="dataset", **medians):
    return changed({"input": 0.1}, source=source, medians=medians)


def of_wait(**facts):
    return changed({"wait": 0.06}, **facts)


def of_ranks():
    options = tuple(inspect.signature(kt.HorovodStrategy).parameters)
    facts = {"strategy": "HorovodStrategy", "options": options}
    return changed({"reduction": 0.1}, ranks=4, **facts)


def of_update(**facts):
    return changed({"update": 0.1}, **facts)


def of_epochs(validation=0.0, ends=0.0, phases=(), first=0.0):
    seconds = {"steps": 1.0, "tracing": 9.0, "validation": validation}
    seconds["ends of epochs"] = ends
    return changed(phases, seconds=seconds, first_validation=first)


def starts(seconds, **facts):
    phases = {"input": seconds, "compute": seconds}
    return Measured(phases, GOOD.names, of_towers=GOOD.of_towers, **facts)


def of_one_device(**facts):
    return Measured({"step": 0.1, "callbacks": 0.0}, **facts)


AT_ONCE = {"source": "arrays", "steps_per_execution": 16}
BEST = "several times."  # without other options
CASES = [
    (GOOD, None),
    (of_input(), "prefetch(tf.data.AUTOTUNE)"),
    (of_input("generator"), "keras.utils.PyDataset with workers=4"),
    (of_input("PyDataset"), "max_queue_size"),
    (of_input("DataLoader"), "num_workers=4"),
    (of_input("arrays"), "for 50% of a step (100.00 ms): compile(..., steps_"),
    (of_input(input=0.001), "average, every so often: 1.00 ms at the median"),
    # Arrays may start an epoch slowly.
    (of_input("arrays", input=0.001), None),
    (
        starts(1e-3),
        "starting a step takes 50% of a step (1.00 ms): compile(..., "
        "steps_per_execution=16)",
    ),
    (starts(1e-3, **AT_ONCE), None),
    (starts(0.1, **AT_ONCE), None),
    (
        of_epochs(validation=5.0, first=3.0),
        "validation takes 67% of the time of epochs (5.00 s)",
    ),
    # A single one may be its trace.
    (of_epochs(validation=5.0, first=5.0), None),
    (of_epochs(ends=1.0), "callbacks take 50% of the time of epochs at their"),
    (changed({"callbacks": 0.05}), "verbose=2"),
    (of_wait(of_towers={"compute": SLOW}), "tower 2 computes 2.0 times"),
    (of_wait(), "now for one, now for another"),
    (changed({"reduction": 0.1}), "(packer=True)"),
    (of_ranks(), 'HorovodStrategy(compression="bf16")'),
    (of_update(updates="each"), 'TowerStrategy(updates="once")'),
    (of_update(updates="sharded"), 'TowerStrategy(updates="once")'),
    (of_update(), BEST),
    (of_update(cores=None), 'try TowerStrategy(updates="sharded")'),
    (of_update(cores=None, updates="sharded"), BEST),
    (of_update(cores=None, towers=1), BEST),
    (changed(cores=2), "4 towers share 2 cores"),
    (of_wait(cores=2), "4 towers share 2 cores"),
    (changed(traces=(7, 9.0)), "7 calls traced the step"),
    (changed(busy=0.4), "idle for 60%"),
    (of_one_device(), "virtual_towers"),
    # Steps that are not known may run on several.
    (of_one_device(towers=2), None),
    (of_one_device(ranks=2), None),
]


@pytest.mark.parametrize(("measured", "wanted"), CASES)
def test_advice(measured, wanted):
    lines = advise(measured)
    assert len(lines) == (wanted is not None)
    assert all(wanted in line for line in lines)


@pytest.mark.parametrize(
    ("measured", "first"),
    [
        (changed({"callbacks": 0.05, "input": 0.2}), "input"),
        # What is long in short steps is behind what fit waits for.
        (of_epochs(ends=4.0, phases={"callbacks": 0.05}), "at their ends"),
    ],
)
def test_the_largest_part_comes_first(measured, first):
    lines = advise(measured)
    assert first in lines[0]
    assert "callbacks" in lines[1]
    assert "of a step" in lines[1]


class OfKeras(keras.utils.PyDataset):
    """Of any length."""


class DataLoader:
    """As of PyTorch."""


@pytest.mark.parametrize(
    ("x", "source"),
    [
        (tf.data.Dataset.range(3), "dataset"),
        (OfKeras(), "PyDataset"),
        ((n for n in range(3)), "generator"),
        (type("Own", (DataLoader,), {})(), "DataLoader"),
        (EVEN, "arrays"),
    ],
)
def test_sources_of_data(x, source):
    assert source_of(x) == source
