"""What is advised where a phase stands out, and nothing where none does."""

import dataclasses
import inspect

import numpy as np
import pytest

import keras_towers as kt
from keras_towers.timeline.advice import advise
from keras_towers.timeline.measured import Measured

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


EPOCHS = {
    "steps": 1.0,
    "tracing": 9.0,
    "validation": 0.0,
    "ends of epochs": 0.0,
}
SLOW = np.array([0.08, 0.08, 0.16, 0.08])
RANKS = {
    "strategy": "HorovodStrategy",
    "options": tuple(inspect.signature(kt.HorovodStrategy).parameters),
    "ranks": 4,
}
CASES = {
    "input": (changed(phases={"input": 0.1}), "prefetch(tf.data.AUTOTUNE)"),
    "input of a generator": (
        changed(phases={"input": 0.1}, source="generator"),
        "keras.utils.PyDataset with workers=4",
    ),
    "input of a PyDataset": (
        changed(phases={"input": 0.1}, source="PyDataset"),
        "max_queue_size",
    ),
    "input of arrays": (
        changed(phases={"input": 0.1}, source="arrays"),
        "input for 50% of a step (100.00 ms): compile(..., steps_per_exec",
    ),
    "input every so often": (
        changed(phases={"input": 0.1}, medians={"input": 0.001}),
        "100.00 ms on average, every so often: 1.00 ms at the median",
    ),
    "start of small steps": (
        Measured({"input": 1e-3, "compute": 1e-3}, EVEN, GOOD.names),
        "starting a step takes 50% of a step (1.00 ms): compile(..., "
        "steps_per_execution=16)",
    ),
    "validation": (
        changed(seconds=EPOCHS | {"validation": 3.0}, first_validation=1.0),
        "validation takes 67% of the time of epochs (3.00 s)",
    ),
    "ends of epochs": (
        changed(seconds=EPOCHS | {"ends of epochs": 1.0}),
        "callbacks take 50% of the time of epochs at their ends (1.00 s)",
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
    "shared update on the host": (
        changed(phases={"update": 0.1}, updates="sharded"),
        'TowerStrategy(updates="once")',
    ),
    "update on accelerators": (
        changed(phases={"update": 0.1}, cores=None),
        'TowerStrategy(updates="sharded") or TowerStrategy(updates="each")',
    ),
    "update by each accelerator": (
        changed(phases={"update": 0.1}, cores=None, updates="each"),
        'try TowerStrategy(updates="sharded").',
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


@pytest.mark.parametrize(
    "best",
    [{"updates": "once"}, {"updates": "sharded", "cores": None}],
    ids=["host", "accelerators"],
)
def test_the_best_update_for_the_devices_needs_no_other(best):
    (line,) = advise(changed(phases={"update": 0.1}, **best))
    assert "updates=" not in line


def test_a_single_tower_has_none_to_share_the_update_with():
    alone = {"cores": None, "towers": 1, "ranks": 4}
    (line,) = advise(changed(phases={"update": 0.1}, **alone))
    assert line.endswith('TowerStrategy(updates="each").')


@pytest.mark.parametrize("seconds", [1e-3, 0.1])
def test_arrays_that_start_many_steps_at_once_need_no_advice(seconds):
    phases = {"input": seconds, "compute": seconds}
    facts = {"source": "arrays", "steps_per_execution": 16}
    assert advise(Measured(phases, EVEN, GOOD.names, **facts)) == []


def test_arrays_that_start_an_epoch_slowly_need_no_advice():
    rare = {"source": "arrays", "medians": {"input": 0.001}}
    assert advise(changed(phases={"input": 0.1}, **rare)) == []


@pytest.mark.parametrize("many", [{"towers": 2}, {"towers": 1, "ranks": 2}])
def test_steps_that_are_not_known_may_run_on_towers(many):
    assert advise(Measured({"step": 0.1}, np.empty(0), **many)) == []


def test_a_single_validation_may_be_its_trace():
    seconds = EPOCHS | {"validation": 5.0}
    assert advise(changed(seconds=seconds, first_validation=5.0)) == []


def test_what_is_long_in_short_steps_comes_behind_what_fit_waits_for():
    seconds = EPOCHS | {"ends of epochs": 4.0}
    lines = advise(changed(phases={"callbacks": 0.05}, seconds=seconds))
    assert ["ends" in lines[0], "callbacks" in lines[1]] == [True, True]


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
