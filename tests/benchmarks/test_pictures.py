"""The pictures of the documentation, of made-up results."""

import importlib
import os

import pytest

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def drawing(monkeypatch):
    """Import a module that draws, and sets variables of TensorFlow."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def saved(tmp_path):
    """Draw a figure into a file, and return all that is written in it."""

    def save(figure):
        figure.savefig(tmp_path / "picture.png")
        texts = figure.findobj(matplotlib.text.Text)
        return {text.get_text() for text in texts if text.get_visible()}

    yield save
    matplotlib.pyplot.close("all")


def test_curves(saved, drawing):
    pytest.importorskip("sklearn")
    curves = {
        "tower": ([0, 1, 2], [2.0, 1.5, 1.25]),
        "parameter-server": ([0, 1, 2], [2.0, 1.6, 1.5]),
        "async": ([0, 1, 2], [2.0, 0.5, 0.25]),
    }
    figure = drawing("async_vs_sync").draw(curves, "a processor, 2 cores")
    assert any("a processor, 2 cores" in text for text in saved(figure))
    legend = [text.get_text() for text in figure.axes[0].get_legend().texts]
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


def test_timelines_of_steps_in_common_and_of_own_ones(saved, drawing):
    plot = drawing("plot_timeline")
    for trace in (traced("compute", 8), traced("step", 8, numbered=False)):
        figure = plot.draw(trace, 3)
        assert len(figure.axes[0].patches) == 3
        assert "tower 1" in saved(figure)
    with pytest.raises(plot.typer.BadParameter, match="fewer than two steps"):
        plot.draw(traced("compute", 1), 3)
