"""The phases of steps, from times that are written down by hand."""

import numpy as np
import pytest

from keras_towers.timeline import phases as phases_lib
from keras_towers.timeline.phases import Calls, Took, of_steps, of_towers

pytestmark = pytest.mark.core
NAN = np.nan


def stamps(*steps):
    """Times of shape [steps, towers, 1 update, points]."""
    return np.array(steps, np.float64)[:, :, None]


# Tower 0 updates for both; tower 1 computes for longer.
STEP = np.array([[1, 3, 7, 9], [1.5, 6, NAN, NAN]])


def spans(phases, name, step=0, update=0):
    return phases[name][step, :, update].tolist()


def test_of_towers():
    phases = of_towers(stamps(STEP))
    assert spans(phases, "compute") == [[1, 3], [1.5, 6]]
    assert spans(phases, "wait") == [[3, 6], [6, 6]]
    # The sums of tower 0 are those of all.
    assert spans(phases, "reduction") == [[6, 7], [6, 7]]
    np.testing.assert_equal(phases["update"][0, :, 0], [[7, 9], [NAN, NAN]])


def test_a_second_optimizer_goes_on_where_the_first_has_ended():
    both = np.stack([STEP, [[NAN, 11, 12, 15], [NAN, 10, NAN, NAN]]], axis=1)
    phases = of_towers(both[None])
    # Tower 1 does not update: it goes on with the sums.
    assert spans(phases, "compute", update=1) == [[9, 11], [7, 10]]
    assert spans(phases, "wait", update=1) == [[11, 11], [10, 11]]
    assert spans(phases, "reduction", update=1) == [[11, 12], [11, 12]]


def test_marks_of_overlapping_work_do_not_go_back_in_time():
    # The first gradients were summed before the last one was computed.
    phases = of_towers(stamps([[0, 5, 4, 6]]))
    assert spans(phases, "reduction") == [[5, 5]]


def calls(*rows):
    return Calls(*np.array(rows, np.float64).T)


def test_of_steps():
    # The first call is traced; each of the others has two steps.
    whole = stamps(STEP, STEP + 100, STEP + 110, STEP + 200, STEP + 210)
    of = calls([0, 10, 11], [99, 121, 125], [199, 221, 225])
    took = of_steps(of_towers(whole), of, np.array([0.5]))
    assert {name: of_phase.mean for name, of_phase in took.items()} == {
        # Two before the first step of a call, two between both: (2 + 2) / 2.
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
    first = of_steps(of_towers(whole[:1]), calls([0, 10, 11]), np.array([0.5]))
    assert first["callbacks"] == (1, 1), "there is no other call"


def test_towers_are_compared_in_means_over_the_steps_that_count():
    rare = STEP.copy()
    rare[1, 1] += 8
    phases = of_towers(stamps(STEP, STEP, STEP, rare))
    np.testing.assert_array_equal(
        phases_lib.per_tower(phases)["compute"], [2, (3 * 4.5 + 12.5) / 4]
    )
    whole = stamps(STEP, STEP + 100, STEP + 150)
    of = calls([0, 10, 10], [100, 110, 110])
    steps = phases_lib.in_calls(of_towers(whole), of)
    found = phases_lib.settled(steps, of, np.array([0.5]))
    assert found.tolist() == [False, True, False]
    found = phases_lib.settled(steps, of, np.array([0, 100]))
    assert found.tolist() == [True, True, False], "all are traced"


def test_steps_of_callbacks_are_of_no_call():
    whole = stamps(STEP, STEP + 50)
    steps = phases_lib.in_calls(of_towers(whole), calls([0, 10, 100]))
    assert steps.call.tolist() == [0, -1]


def test_without_any_step():
    nothing = of_towers(np.empty((0, 0, 1, 4)))
    none = Calls(*np.empty((3, 0)))
    assert of_steps(nothing, none, np.empty(0)) == {}
    assert phases_lib.of_one_device(none, np.empty(0)) == {}


def test_callbacks_in_another_thread_take_no_time():
    of = calls([0, NAN, 10], [10, NAN, 20])
    took = phases_lib.of_one_device(of, np.empty(0))
    assert took == {"step": (10, 10), "callbacks": (0, 0)}


def test_one_device_without_traces_and_the_end_of_the_data():
    of = calls([0, 50, 51], [51, 53, 54], [54, 58, 60], [60, NAN, 61])
    took = phases_lib.of_one_device(of, np.array([0.0]))
    assert took == {"step": Took(3, 3), "callbacks": Took(1.5, 1.5)}


def test_of_spans():
    # The first step of tower 0 is traced; tower 1 has only one.
    spans = np.array([[0, 0, 4], [1, 0, 4], [0, 4, 5], [0, 5, 6]])
    took, towers = phases_lib.of_spans(spans, 3)
    assert took == {"a tower's step": (2, 1)}
    np.testing.assert_equal(towers["step"], [1, 4, NAN])
