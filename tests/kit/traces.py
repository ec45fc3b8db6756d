"""A ``fit`` that ``kt.Timeline`` measures, and the trace of it."""

import json

import keras

import keras_towers as kt
from tests.kit.training import fit, linear


def fit_with_timeline(path, model=None, strategy=None, epochs=1, **options):
    """A trained model, its ``Timeline``, and what that has written."""
    keras.utils.set_random_seed(1)
    model = model or linear()
    callbacks = options.pop("callbacks", [])
    timeline = kt.Timeline(path)
    with strategy or kt.TowerStrategy(2):
        fit(model, epochs, callbacks=[timeline, *callbacks], **options)
    return model, timeline, read_trace(path)


def read_trace(path):
    """The events of a trace by name, after a check of all that viewers need."""
    events = json.loads(path.read_text())["traceEvents"]
    found, named, used = {}, set(), set()
    for event in events:
        lane = event["pid"], event["tid"]
        assert {"name", "ph", "args"} <= event.keys()
        used.add(lane)
        if event["name"] == "thread_name":
            named.add(lane)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            found.setdefault(event["name"], []).append(event)
        else:
            assert event["ph"] == "M"
    assert used <= named
    return found


def end(event):
    return event["ts"] + event["dur"]


def by_step(events):
    return {(e["args"]["step"], e["tid"]): e for e in events}
