"""What the reports of ranks say of other ranks."""

import pytest

from keras_towers.jobs.rendezvous import activity, reports
from keras_towers.jobs.rendezvous.reports import Report, Reports
from keras_towers.jobs.rendezvous.store import Progress

STEP = "step 3"
PREPARES = "the preparation of step 3"


def reports_of(*progress, silent_s=0, since_s=9):
    """What ranks have said, the last ones so long ago."""
    ages = [0, *[silent_s] * len(progress[1:])]
    return Reports(
        {
            rank: Report(100 - age, 100 - age - since_s, one)
            for rank, (age, one) in enumerate(zip(ages, progress, strict=True))
            if one
        }
    )


@pytest.mark.parametrize(
    ("its", "silent_s", "found"),
    [
        (None, 0, "has given no sign of life"),
        (([0, 3, 7], STEP), 9, "has stopped giving signs of life"),
        (([0, 3, 7], STEP), 1, None),
        (([0, 2, 9], "step 2 of fit"), 1, "was last seen in step 2 of fit"),
        # It does something else, as a callback that sleeps.
        (
            ([0, 2, 9], "step 2 of fit", False, True),
            1,
            "was last seen after step 2 of fit",
        ),
        # It has not begun the exchange in which this rank waits.
        (([0, 3, 6], STEP), 1, f"was last seen in {STEP}"),
        (([0, 0, 0], ""), 1, "is outside of training"),
        (([0, 4, 7], "step 4"), 1, None),
        # It has not connected again since a call has failed.
        (([-1, 9, 9], STEP, True), 1, f"is in {STEP}"),
        # It waits, too, but for something else.
        (
            ([0, 3, 7], "the end of epoch 1", True),
            1,
            "is in the end of epoch 1",
        ),
        # It has not reached the action in which this rank waits.
        (([0, 3, 7], PREPARES), 1, f"was last seen in {PREPARES}"),
    ],
)
def test_a_report_returns_which_ranks_are_late(its, silent_s, found):
    other = its and Progress(2, 5, *its)
    reports = reports_of(
        Progress(2, 5, [0, 3, 7], STEP), other, silent_s=silent_s
    )
    assert reports.awaited(0) == ({"rank 1": found} if found else {})


def waiting(position=(0, 3, 7), action=STEP, waits=True, **more):
    return Progress(2, 5, list(position), action, waits, **more)


TOO = "waits there, too"


@pytest.mark.parametrize(
    ("mine", "its", "since_s", "found"),
    [
        (waiting(), waiting(), 9, TOO),
        # What it sent last does not arrive here.
        (waiting(), waiting((0, 4, 8), "step 4"), 9, "is in step 4"),
        (waiting(), waiting((0, 4, 8), "", False), 9, "is outside of training"),
        # They may go on.
        (waiting(), waiting(), 0, None),
        # It computes, as all do.
        (waiting(waits=False), waiting(waits=False), 9, None),
        # The other has not come to the exchange, and is late.
        (
            waiting(),
            waiting((0, 3, 6), waits=False),
            0,
            f"was last seen in {STEP}",
        ),
    ],
)
def test_ranks_that_all_wait_are_told_so(mine, its, since_s, found):
    reports = reports_of(mine, its, since_s=since_s)
    assert reports.awaited(0) == ({"rank 1": found} if found else {})


IN_STEP = {"exchanges": ["sum"], "begun": {"sum": 5, "gather": 2}}
IN_PYTHON = {
    "exchanges": ["gather"],
    "begun": {"sum": 4, "gather": 3},
    "in_python": True,
}


OTHER = {"exchanges": ["other"], "begun": {"other": 1, "gather": 2}}


@pytest.mark.parametrize(
    ("its", "since_s", "are_apart"),
    [
        (waiting(**IN_STEP), 9, True),
        (waiting(**IN_PYTHON | OTHER), 9, True),
        (waiting(**IN_STEP), 0, False),
        (waiting(**IN_PYTHON), 9, False),
        # Wherever they are otherwise: it may have left a block, or have begun
        # two exchanges at a time.
        (waiting((0, 5, 7), **IN_STEP), 9, True),
        (waiting((0, 3, 8), **IN_STEP), 9, True),
        # It has begun the exchange of this rank, or this rank has begun its.
        (waiting(**IN_STEP | {"begun": {"sum": 5, "gather": 3}}), 9, False),
        (waiting(**IN_STEP | {"begun": {"sum": 4, "gather": 2}}), 9, False),
        (waiting(), 9, False),
    ],
)
def test_ranks_in_exchanges_that_never_meet(its, since_s, are_apart):
    mine = waiting(does="compares the model", **IN_PYTHON)
    reports = reports_of(mine, its, since_s=since_s)
    both = {"rank 0": "compares the model", "rank 1": f"is in {STEP}"}
    assert reports.apart(0) == (both if are_apart else {})
    assert reports.apart(1) == (both if are_apart else {})


@pytest.mark.parametrize(
    ("its", "since_s", "waits_in_vain"),
    [
        # Rank 0 waits for this one, however far it is.
        (waiting((0, 5, 9), **IN_PYTHON), 9, True),
        (waiting((0, 3, 6), **IN_STEP), 9, True),
        # It computes, or may go on.
        (waiting(), 9, False),
        (waiting(**IN_PYTHON), 0, False),
    ],
)
def test_rank_0_waits_and_will_not_save(its, since_s, waits_in_vain):
    saves = {"exchanges": [activity.SAVE], "in_python": True}
    mine = waiting(does="waits for a save", **saves)
    reports = reports_of(its, mine, since_s=since_s)
    both = {"rank 0": f"is in {STEP}", "rank 1": "waits for a save"}
    assert reports.apart(1) == (both if waits_in_vain else {})
    # It can go on once the other one has its error.
    assert reports.apart(0) == {}
    # Only rank 0 saves: nobody waits for another one.
    others = reports_of(waiting(), waiting(**IN_PYTHON), mine, since_s=since_s)
    assert others.apart(2) == {}
    assert others.apart(1) == {}


def test_graphs_may_begin_exchanges_in_another_order():
    mine, its = waiting(**IN_STEP), waiting(**OTHER)
    assert reports_of(mine, its).apart(0) == {}


def test_no_report_looks_at_all_ranks(monkeypatch):
    """Of many ranks that all wait; only what has changed is looked at again."""
    size, looks = 60, []

    class Looked(Report):
        @property
        def is_unchanged(self):
            looks.append(self)
            return self.since < self.arrived

    monkeypatch.setattr(reports, "Report", Looked)
    all_wait = Reports()
    for _ in range(2):
        for rank in range(size):
            all_wait.add(rank, Progress(size, 5, [0, 3, 7], STEP, True))
    found = [all_wait.awaited(rank) for rank in range(size)]
    assert found[0] == found[0] | {"rank 1": TOO, "8 more": "likewise"}
    assert not looks
    # One of them moves, though others may not look at it.
    all_wait.add(40, Progress(size, 5, [0, 3, 8], STEP, True))
    assert all_wait.awaited(0) == {}
    all_wait.add(40, Progress(size, 5, [0, 3, 8], STEP, True))
    assert all_wait.awaited(0)["rank 1"] == TOO
    # One that is behind will come.
    for _ in range(2):
        all_wait.add(40, Progress(size, 5, [0, 3, 6], STEP, True))
    assert all_wait.awaited(0) == {}
