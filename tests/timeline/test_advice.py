"""What is advised where a phase stands out, and nothing where none does."""

import dataclasses
import inspect

import numpy as np
import pytest

import keras_towers as kt
from keras_towers.timeline.advice import Measured, advise

pytestmark = pytest.mark.core

EVEN = np.full(4, 0.08)
GOOD = Measured(
    {
        "input": 0.001,
        "compute": 0.08,
        "wait": 0.002,
        "reduction": 0.008,
        "update": 0.006,
        "rest": 0.002,
        "callbacks": 0.001,
    },
    EVEN,
    [f"tower {k}" for k in range(4)],
    options=tuple(inspect.signature(kt.TowerStrategy).parameters),
    cores=4,
    towers=4,
    traces=(1, 2.0),
)


def changed(compute=EVEN, phases=(), **facts):
    phases = GOOD.phases | dict(phases)
    return dataclasses.replace(GOOD, phases=phases, compute=compute, **facts)


def test_nothing_stands_out():
    assert advise(GOOD) == []


SLOW = np.array([0.08, 0.08, 0.16, 0.08])
RANKS = {
    "strategy": "HorovodStrategy",
    "options": tuple(inspect.signature(kt.HorovodStrategy).parameters),
    "ranks": 4,
}
CASES = {
    "input": (changed(phases={"input": 0.1}), "prefetch(tf.data.AUTOTUNE)"),
    "start of small steps": (
        Measured({"input": 1e-3, "compute": 1e-3}, EVEN, GOOD.names),
        "(1.00 ms): compile(..., steps_per_execution=16)",
    ),
    "callbacks": (changed(phases={"callbacks": 0.05}), "verbose=2"),
    "a slow tower": (
        changed(SLOW, {"wait": 0.06}),
        "tower 2 computes 2.0 times",
    ),
    "towers in turn": (
        changed(phases={"wait": 0.06}),
        "now for one, now for another",
    ),
    "reduction": (changed(phases={"reduction": 0.1}), "(packer=True)"),
    "reduction over ranks": (
        changed(phases={"reduction": 0.1}, **RANKS),
        'HorovodStrategy(compression="bf16")',
    ),
    "update by each": (
        changed(phases={"update": 0.1}, updates="each"),
        'TowerStrategy(updates="once")',
    ),
    "update on accelerators": (
        changed(phases={"update": 0.1}, cores=None),
        'TowerStrategy(updates="each")',
    ),
    "cores": (changed(cores=2), "4 towers share 2 cores"),
    "traces": (changed(traces=(7, 9.0)), "7 calls traced the step"),
    "idle": (changed(busy=0.4), "idle for 60%"),
    "one device": (
        Measured({"step": 0.1, "callbacks": 0.0}, np.empty(0)),
        "virtual_towers",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advice(name):
    measured, wanted = CASES[name]
    (line,) = advise(measured)
    assert wanted in line


def test_the_best_update_for_the_device_needs_no_other():
    (line,) = advise(changed(phases={"update": 0.1}))
    assert "updates=" not in line


def test_more_towers_than_cores_are_why_they_wait():
    lines = advise(changed(phases={"wait": 0.06}, cores=2))
    assert lines == advise(changed(cores=2))


def test_the_largest_phase_comes_first():
    lines = advise(changed(phases={"callbacks": 0.05, "input": 0.2}))
    assert ["input" in lines[0], "callbacks" in lines[1]] == [True, True]


def test_options_that_are_named_exist():
    strategy = set(inspect.signature(kt.TowerStrategy).parameters)
    ranks = set(inspect.signature(kt.HorovodStrategy).parameters)
    assert {"packer", "updates"} <= strategy
    assert {"packer", "updates", "compression"} <= ranks
