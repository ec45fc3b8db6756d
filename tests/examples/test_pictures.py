"""The pictures of the documentation, of made-up results."""

import importlib.util
import os
from pathlib import Path

import pytest

from keras_towers.bench import charts
from keras_towers.bench.field.rows import LISTED
from keras_towers.bench.rows import SUITES

matplotlib = pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"
MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "gpus": [],
    "keras": "3.15.1",
}


@pytest.fixture
def example(monkeypatch):
    """Import an example, which sets variables of TensorFlow."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return _imported


def _imported(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def saved(tmp_path):
    """Draw a figure into a file, and return all that is written in it."""

    def save(figure):
        figure.savefig(tmp_path / "picture.png")
        texts = figure.findobj(matplotlib.text.Text)
        return {text.get_text() for text in texts if text.get_visible()}

    yield save
    matplotlib.pyplot.close("all")


def spread(median):
    return median and {
        "median": median,
        "low": 0.9 * median,
        "high": 1.2 * median,
    }


def report(**suites):
    """A report as the bench writes it."""
    fixed = {"machine": MACHINE, "settings": {"repeats": 3}}
    return {**fixed, "training": [], "processes": [], **suites}


def labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_training(saved, example):
    medians = {"plain": 4, "stock-default": 30, "towers": 5, "towers-gpu": 6}
    # The last one failed.
    medians |= {"parameter-server": 3, "async": None}
    document = report(
        training=[
            {
                "model": model,
                "towers": towers,
                "strategy": row,
                "step_ms": spread(median and median * towers * factor),
            }
            for model, factor in (("small", 1), ("large", 10))
            for towers in (1, 2, 4)
            for row, median in medians.items()
        ]
    )
    figure = example("plot_bench").draw(document)
    texts = saved(figure)
    # The fastest first.
    assert labels(figure) == [
        "ParameterServerTowerStrategy",
        "plain Keras",
        "TowerStrategy",
        "TowerStrategy, gpu",
        "MirroredStrategy",
    ]
    # Two towers of the small model, and four of the large one.
    assert {"6.00", "60.0", "120.0", "1200.0"} <= texts
    assert {"small, 2 towers", "large, 4 towers"} <= texts
    assert not {"small, 1 towers", "PyTorch"} & texts
    assert any("a processor, 2 cores, no GPU; Keras 3.15.1" in t for t in texts)
    # The panels of a model have one scale, with room for all that is drawn.
    limits = [axes.get_xlim() for axes in figure.axes]
    assert limits[0] == limits[1] != limits[2] == limits[3]
    assert limits[0][1] > 1.2 * 30 * 4


def test_processes(saved, example):
    costs = {"strategy": 29, "horovod-raw": 58, "torch-ddp": 36}
    costs |= {"strategy-bf16": 51, "compute": None}
    rows = [
        {"model": "large", "processes": 2, "row": row, "cost_ms": spread(cost)}
        for row, cost in costs.items()
    ]
    figure = example("plot_bench").draw(report(processes=rows))
    assert labels(figure)[0] == "HorovodStrategy"
    assert "HorovodStrategy, bf16" in labels(figure)
    assert {"large, 2 processes", "29.0", "PyTorch"} <= saved(figure)


def test_every_row_of_the_bench_has_a_title_and_a_kind():
    assert set(LISTED) <= set(charts.FIELD_TITLES)
    rows = [row for suite in SUITES.values() for row in suite.rows.values()]
    for row in rows:
        # Those without exchange have no cost to draw.
        if "compute" in row.name:
            continue
        assert charts.title(row.name)
        ours = charts.kind(row.name) in ("default", "ours")
        assert ours == row.ours, row.name


def test_curves(saved, example):
    pytest.importorskip("sklearn")
    curves = {
        "tower": ([0, 1, 2], [2.0, 1.5, 1.25]),
        "parameter-server": ([0, 1, 2], [2.0, 1.6, 1.5]),
        "async": ([0, 1, 2], [2.0, 0.5, 0.25]),
    }
    figure = example("async_vs_sync").draw(curves, "a processor, 2 cores")
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


def test_timelines_of_steps_in_common_and_of_own_ones(saved, example):
    plot = example("plot_timeline")
    for trace in (traced("compute", 8), traced("step", 8, numbered=False)):
        figure = plot.draw(trace, 3)
        assert len(figure.axes[0].patches) == 3
        assert "tower 1" in saved(figure)
    with pytest.raises(plot.typer.BadParameter, match="fewer than two steps"):
        plot.draw(traced("compute", 1), 3)
