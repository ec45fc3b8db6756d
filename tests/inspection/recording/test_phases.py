"""The phases of steps, by times and clocks that are set by hand."""

import numpy as np
import pytest

from keras_towers.inspection.recording import phases as phases_lib
from keras_towers.inspection.recording.phases import (
    StepTimes,
    find_steps,
    step_seconds,
    tower_phases,
)

pytestmark = pytest.mark.core
NAN = np.nan
# Of two towers: begun, computed, reduced, updated. Tower 0 updates for both;
# tower 1 computes for longer.
STEP = np.array([[1, 3, 7, 9], [1.5, 6, NAN, NAN]])


def steps(*times):
    """The phases of steps, [steps, towers, points]."""
    return tower_phases(np.array(times, np.float64))


def calls(*rows, traced=()):
    """StepTimes that began, returned and ended; some of them traced."""
    times = np.array(rows, np.float64).reshape(-1, 3).T
    return StepTimes(*times, np.isin(range(len(rows)), traced) * 1)


def spans(phases, name):
    return phases[name][0].tolist()


def means(seconds):
    return {name: of_phase.mean() for name, of_phase in seconds.items()}


def test_a_tower_waits_for_the_last_one_and_all_for_the_sums():
    phases = steps(STEP)
    assert spans(phases, "compute") == [[1, 3], [1.5, 6]]
    assert spans(phases, "wait") == [[3, 6], [6, 6]]
    # The sums of tower 0 are those of all.
    assert spans(phases, "reduction") == [[6, 7], [6, 7]]
    np.testing.assert_equal(phases["update"][0], [[7, 9], [NAN, NAN]])


def test_marks_of_overlapping_work_do_not_go_back_in_time():
    # The first gradients were summed before the last one was computed.
    assert spans(steps([[0, 5, 4, 6]]), "reduction") == [[5, 5]]


def test_phases_add_up_to_a_step_and_traced_calls_do_not_count():
    # The first call is traced; each of the others has two steps.
    phases = steps(STEP, STEP + 100, STEP + 110, STEP + 200, STEP + 210)
    of = calls([0, 10, 11], [99, 121, 125], [199, 221, 225], traced=[0])
    assert means(step_seconds(phases, of)) == {
        # Two before the first step of a call, two between both.
        "input": 2.0,
        "compute": (2 + 4.5) / 2,
        # Tower 0 for 3, and tower 1 for 0.5 until it began.
        "wait": 1.75,
        "reduction": 1.0,
        "update": 2.0,
        # From 119 to 121, for two steps.
        "rest": 1.0,
        "callbacks": 2.0,
    }


def test_traced_calls_count_if_there_are_no_others():
    of = calls([0, 10, 11], traced=[0])
    assert means(step_seconds(steps(STEP), of))["callbacks"] == 1


def test_steps_of_callbacks_are_of_no_call():
    found = find_steps(steps(STEP, STEP + 50), calls([0, 10, 100]))
    assert found.call.tolist() == [0, -1]
    assert found.counts.tolist() == [True, False]


def test_without_any_step_there_are_no_phases():
    nothing = tower_phases(np.empty((0, 0, 4)))
    assert step_seconds(nothing, calls()) == {}
    assert phases_lib.call_seconds(calls()) == {}


@pytest.mark.parametrize(
    ("of", "wanted"),
    [
        # Callbacks run in another thread.
        (calls([0, NAN, 10], [10, NAN, 20]), {"step": 10, "callbacks": 0}),
        # The first call prepares the steps; the last finds the data's end.
        (
            calls([0, 50, 51], [51, 53, 54], [54, 58, 60], [60, NAN, 61]),
            {"step": 3, "callbacks": 1.5},
        ),
        (calls([0, 50, 51]), {"step": 50, "callbacks": 1}),
    ],
)
def test_calls_where_no_step_is_divided(of, wanted):
    assert means(phases_lib.call_seconds(of)) == wanted


def test_steps_that_towers_have_not_in_common():
    # The first step of tower 0 is traced; tower 1 has only one.
    spans = np.array([[0, 0, 4], [1, 0, 4], [0, 4, 5], [0, 5, 6]])
    (seconds,) = phases_lib.span_seconds(spans).values()
    assert seconds.tolist() == [1, 1, 4]
