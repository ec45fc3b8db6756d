"""What is advised where a phase stands out, and what a ``fit`` prints."""

import collections
import dataclasses
import inspect
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.step.function import GraphFunction
from keras_towers.timeline.measured import Measured, source_of
from keras_towers.timeline.report import advise
from tests.kit.traces import timed
from tests.kit.training import STEPS, linear

EVEN, SLOW = np.full(4, 0.08), np.array([0.08, 0.08, 0.16, 0.08])
# The clock saw nothing of three towers.
NONE = np.array([0.0, 0.0, 0.08, 0.0])
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
    (of_wait(of_towers={"compute": NONE}), "tower 2 computes 80000.0 times"),
    (of_wait(), "now for one, now for another"),
    (changed({"reduction": 0.1}), "(packer=True)"),
    (of_ranks(), 'HorovodStrategy(compression="bf16")'),
    (of_update(updates="each"), 'TowerStrategy(updates="once")'),
    (of_update(), BEST),
    (of_update(cores=None), 'try TowerStrategy(updates="sharded")'),
    (of_update(cores=None, updates="sharded"), BEST),
    (changed(cores=2), "4 towers share 2 cores"),
    (of_wait(cores=2), "4 towers share 2 cores"),
    (changed(traces=(7, 9.0)), "7 calls traced the step"),
    (changed(busy=0.4), "idle for 60%"),
    (of_one_device(), "virtual_towers"),
    # Steps that are not known may run on several.
    (of_one_device(towers=2), None),
    (of_one_device(ranks=2), None),
]


@pytest.mark.core
@pytest.mark.parametrize(("measured", "wanted"), CASES)
def test_advice(measured, wanted):
    lines = advise(measured)
    assert len(lines) == (wanted is not None)
    assert all(wanted in line for line in lines)


@pytest.mark.core
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


@pytest.mark.core
def test_sources_of_data():
    for bases, source in (
        ((keras.utils.PyDataset,), "PyDataset"),
        # As of PyTorch.
        ((type("DataLoader", (), {}),), "DataLoader"),
    ):
        assert source_of(type("Own", bases, {})()) == source
    assert source_of(tf.data.Dataset.range(3)) == "dataset"
    assert source_of(n for n in range(3)) == "generator"
    assert source_of(EVEN) == "arrays"


@pytest.fixture
def slow_tower(monkeypatch):
    """Let tower 1 sleep at the end of its functions."""
    original, calls = GraphFunction.__call__, collections.Counter()

    def called(function, inputs):
        results = original(function, inputs)
        # The two towers call it one after the other.
        calls[function] += 1
        if not results or calls[function] % 2:
            return results
        with tf.control_dependencies(results):
            sleep = tf.py_function(lambda: time.sleep(0.1), [], [])
        with tf.control_dependencies([sleep]):
            return [tf.identity(result) for result in results]

    monkeypatch.setattr(GraphFunction, "__call__", called)


def test_a_slow_tower_is_named(path, slow_tower):
    _, timeline, found = timed(path, linear(), epochs=2)
    # Of one of two towers.
    assert timeline.phases["compute"] > 100 / 2
    assert timeline.phases["wait"] > 50 / 2
    (line,) = [a for a in timeline.advice if "computes" in a]
    assert "tower 1 (/device:CPU:1)" in line
    waits = [e["tid"] for e in found["wait"] if e["dur"] > 50_000]
    # The row of tower 0 is behind that of the host. On a machine that is busy,
    # tower 1 may have to wait now and then, too.
    assert waits.count(1) > STEPS > waits.count(2)
    assert set(waits) <= {1, 2}


class EveryFourth(keras.callbacks.Callback):
    """Sleeps behind each fourth batch, and at the ends of epochs."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1 * (batch % 4 == 3))

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.05)


def test_what_is_slow_every_so_often_is_named(path, capsys):
    _, timeline, found = timed(path, epochs=3, callbacks=[EveryFourth()])
    assert sum(e["dur"] > 99_000 for e in found["callbacks"]) >= 3
    assert timeline.phases["callbacks"] > 15
    said = "\n".join(timeline.advice)
    assert re.search(r"callbacks take .* on average, every so often", said)
    assert re.search(r"callbacks take .* at their ends", said)
    printed = capsys.readouterr().out
    steps, whole = re.search(
        r"steps: (\S+) of (\S+) s of fit", printed
    ).groups()
    assert 0.19 < float(steps) < float(whole)
    parts = dict(re.findall(r"^([a-z ]+): (\S+) s\b", printed, re.MULTILINE))
    assert float(parts["ends of epochs"]) > 0.14
    explained = float(steps) + sum(map(float, parts.values()))
    assert abs(explained - float(whole)) < 0.01 * (len(parts) + 2)
    assert re.search(r"callbacks .* every so often", printed)
