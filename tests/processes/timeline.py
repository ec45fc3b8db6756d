"""Checks of a worker: ``kt.Timeline`` on two ranks."""

import json
import pathlib
import sys

import pytest

import keras_towers as kt
from tests.kit.ranks import check
from tests.processes.small import (
    RANK,
    Strategy,
    X,
    Y,
    assert_equal_on_ranks,
    assert_same_model,
    gather,
    model,
)

FOLDER = pathlib.Path(sys.argv[1])


def events(path):
    found = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event["ph"] == "X"]


@check
def timeline_of_all_ranks():
    path = FOLDER / "trace.json"
    timeline = kt.Timeline(path)
    wanted, timed = model(), model()
    with Strategy():
        wanted.fit(X, Y, batch_size=10, epochs=2, verbose=0)
        timed.fit(
            X, Y, batch_size=10, epochs=2, verbose=0, callbacks=[timeline]
        )
    assert_same_model(timed, wanted)
    gather(None)
    # One file has the ten steps of both ranks, on one clock.
    found = events(path)
    for name in ("compute", "reduction", "update"):
        places = [
            (event["args"]["step"], event["pid"])
            for event in found
            if event["name"] == name
        ]
        assert sorted(places) == [(s, r) for s in range(10) for r in range(2)]
    for step in range(10):
        begins = [
            event["ts"]
            for event in found
            if event["name"] == "reduction" and event["args"]["step"] == step
        ]
        assert abs(begins[0] - begins[1]) < 0.2, "it begins with the last rank"
    assert {e["pid"] for e in found if e["name"] == "input"} == {0, 1}
    assert bool(timeline.phases) == (RANK == 0)
    assert not path.with_name("trace.rank1.json").exists()


@check
def timeline_of_a_fit_that_fails():
    class Fails(kt.Timeline):
        def on_train_end(self, logs=None):
            raise RuntimeError

    path = FOLDER / "failed.json"
    with Strategy(), pytest.raises(RuntimeError):
        model().fit(X, Y, batch_size=10, verbose=0, callbacks=[Fails(path)])
    own = path if RANK == 0 else path.with_name("failed.rank1.json")
    assert {event["pid"] for event in events(own)} == {RANK}
    gather(None)


@check
def timeline_on_one_rank_only():
    callbacks = [kt.Timeline(FOLDER / "one.json")] if RANK == 0 else []
    with Strategy(), pytest.raises(kt.TowerError) as refused:
        model().fit(X, Y, batch_size=10, verbose=0, callbacks=callbacks)
    assert "rank 0: Timeline, rank 1: None" in str(refused.value)
    assert_equal_on_ranks(str(refused.value))
