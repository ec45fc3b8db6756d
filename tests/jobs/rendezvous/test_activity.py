"""What a rank does is counted, and named."""

import pytest

from keras_towers.jobs.rendezvous import activity
from tests.kit.leaving import Boom


def test_what_one_rank_does_alone_is_named_and_is_no_further_action():
    activity.mark("on_epoch_end")
    marks = activity.this_rank.marks
    with activity.within("predict on this rank alone"):
        assert activity.this_rank.action == "predict on this rank alone"
        assert not activity.this_rank.waits
    assert activity.this_rank.action == "on_epoch_end"
    assert activity.this_rank.waits and activity.this_rank.marks == marks
    activity.mark("")


def test_exchanges_of_graphs_are_those_that_have_begun_and_not_ended():
    counts = activity.ExchangeCounts()
    counts.add("sum", lambda: (7, 6))
    counts.add("gather", lambda: (4, 4))
    with counts.running("names"), counts.running("names"):
        begun = {"sum": 7, "gather": 4, "names": 2}
        assert counts.read() == (begun, ["names"], ["sum"])
    with pytest.raises(Boom), counts.running("names"):
        raise Boom
    begun["names"] = 3
    assert counts.read() == (begun, [], ["sum"])
    # That of a step that was cancelled has ended with it.
    counts.settle()
    assert counts.read() == (begun, [], [])
    counts.add("sum", lambda: (8, 6))
    assert counts.read() == (begun | {"sum": 8}, [], ["sum"])
