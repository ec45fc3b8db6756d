"""The pictures of the documentation, of made-up results."""

import os
import types

import pytest

from keras_towers.errors import TowerError
from tests.bench.shared import FACTS

matplotlib = pytest.importorskip("matplotlib")

from benchmarks import charts  # noqa: E402


@pytest.fixture
def saved(tmp_path):
    """Draw a figure into a file, and return all that is written in it."""

    def save(figure):
        figure.savefig(tmp_path / "picture.png")
        texts = figure.findobj(matplotlib.text.Text)
        return {text.get_text() for text in texts if text.get_visible()}

    return save


def curve(*losses):
    times, updates = [0, 1, 2], [0, 10, 20]
    return types.SimpleNamespace(times=times, losses=losses, updates=updates)


def test_curves(saved, monkeypatch):
    pytest.importorskip("sklearn")
    # It sets variables of TensorFlow.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    from benchmarks import slow_device

    panels = slow_device.draw_updates, slow_device.draw_losses
    curves = curve(2.0, 1.5, 1.25), curve(2.0, 1.6, 1.5), curve(2.0, 0.5, 0.25)
    figure = slow_device.draw(
        slow_device.ASYNC_VS_SYNC, curves, "a processor, 2 cores", *panels
    )
    assert any("a processor, 2 cores" in text for text in saved(figure))
    legend = [text.get_text() for text in figure.axes[1].get_legend().texts]
    assert legend == [
        "AsyncTowerStrategy, does not wait: 0.25",
        "TowerStrategy (the default), waits: 1.25",
        "ParameterServerTowerStrategy, waits: 1.50",
    ]


def traced(name, steps, numbered=True):
    """A trace of steps, one behind the other on two towers."""
    events = [
        {"name": "thread_name", "ph": "M", "args": {"name": f"tower {tower}"}}
        for tower in (0, 1)
    ]
    for step in range(steps):
        own = {"ts": 1e3 * step, "args": {"step": step} if numbered else {}}
        events.append({"name": name, "ph": "X", "dur": 900, **own})
    places = ({"pid": 0, "tid": number % 2} for number in range(len(events)))
    both = zip(events, places, strict=True)
    return {"traceEvents": [event | place for event, place in both]}


def test_timelines_of_steps_in_common_and_of_own_ones(saved):
    for trace in (traced("compute", 8), traced("step", 8, numbered=False)):
        figure = charts.draw([trace], 3)
        assert len(figure.axes[0].patches) == 3
        assert "tower 1" in saved(figure)
    with pytest.raises(TowerError, match="fewer than two steps"):
        charts.draw([traced("compute", 1)], 3)


def test_scaling_of_several_files(saved, monkeypatch):
    monkeypatch.setattr(charts, "machine_facts", lambda timeout_s: FACTS)
    row = dict.fromkeys(("seconds", "steps", "launcher_cpu_s"), 2)
    row |= {"requests_first": 8, "sent_first": 4e6}
    what = "idle", "stall", "meet", "launch", *charts.ENGINES
    files = [
        [{**row, "what": name, "ranks": ranks} for name in what]
        for ranks in (2, 4)
    ]
    figure = charts.draw(files, 3)
    assert any("a processor, 2 cores" in text for text in saved(figure))
    requests, _, sent = figure.axes
    assert requests.lines[0].get_xydata().tolist() == [[2, 4], [4, 4]]
    assert sent.lines[0].get_xydata().tolist() == [[2, 2], [4, 2]]
