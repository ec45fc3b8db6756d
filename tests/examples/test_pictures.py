"""The pictures of the documentation, of made-up results."""

import importlib.util
from pathlib import Path

import pytest

matplotlib = pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"
MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "gpus": [],
    "keras": "3.15.1",
}


def example(name):
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
        return [text.get_text() for text in texts if text.get_visible()]

    yield save
    matplotlib.pyplot.close("all")


def spread(median):
    return {"median": median, "low": 0.9 * median, "high": 1.2 * median}


def training(**medians):
    """A report of two models on several towers, as the bench writes it."""
    return {
        "machine": MACHINE,
        "settings": {"repeats": 3},
        "training": [
            {
                "model": model,
                "towers": towers,
                "strategy": row.replace("_", "-"),
                "step_ms": median and spread(median * towers * factor),
            }
            for model, factor in (("small", 1), ("large", 10))
            for towers in (1, 2, 4)
            for row, median in medians.items()
        ],
        "processes": [],
    }


def labels(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_rows_are_sorted_labelled_and_explained(saved):
    bench = example("plot_bench")
    document = training(
        plain=4, stock_default=30, towers=5, towers_gpu=6, parameter_server=3
    )
    figure = bench.draw(document)
    texts = saved(figure)
    assert labels(figure) == [
        "ParameterServerTowerStrategy",
        "plain Keras",
        "TowerStrategy",
        "TowerStrategy, gpu",
        "MirroredStrategy",
    ]
    weights = [x.get_weight() for x in figure.axes[0].get_yticklabels()]
    assert weights.index("bold") == 2
    assert weights.count("bold") == 1
    # Two towers of the small model, and four of the large one.
    assert {"6.00", "60.0", "120.0", "1200.0"} <= set(texts)
    assert {"small, 2 towers", "large, 4 towers"} <= set(texts)
    assert "small, 1 towers" not in texts
    assert any("a processor, 2 cores, no GPU; Keras 3.15.1" in t for t in texts)
    assert any("3 repeats" in t for t in texts)
    assert "keras_towers, default strategy" in texts
    assert "PyTorch" not in texts


def test_panels_of_a_model_have_one_scale():
    figure = example("plot_bench").draw(training(plain=1, towers=2))
    limits = [axes.get_xlim() for axes in figure.axes]
    assert limits[0] == limits[1] != limits[2] == limits[3]
    # All that is drawn has room.
    assert limits[0][1] > 1.2 * 2 * 4


def test_a_row_that_failed_has_no_bar(saved):
    bench = example("plot_bench")
    figure = bench.draw(training(plain=1, towers=2, stock_default=None))
    assert labels(figure) == ["plain Keras", "TowerStrategy"]
    saved(figure)


def test_processes(saved):
    costs = {"strategy": 29, "horovod-raw": 58, "torch-ddp": 36}
    costs |= {"strategy-bf16": 51, "compute": None}
    figure = example("plot_bench").draw(
        {
            "machine": MACHINE,
            "settings": {"repeats": 3},
            "training": [],
            "processes": [
                {
                    "model": "large",
                    "processes": 2,
                    "row": row,
                    "cost_ms": cost and spread(cost),
                }
                for row, cost in costs.items()
            ],
        }
    )
    assert labels(figure)[0] == "HorovodStrategy"
    assert "HorovodStrategy, bf16" in labels(figure)
    assert {"large, 2 processes", "29.0", "PyTorch"} <= set(saved(figure))


def test_every_row_of_the_bench_has_a_title_and_a_kind():
    from keras_towers.bench import charts
    from keras_towers.bench.field.rows import LISTED
    from keras_towers.bench.rows import SUITES

    assert set(LISTED) <= set(charts.FIELD_TITLES)
    rows = [row for suite in SUITES.values() for row in suite.rows.values()]
    for row in rows:
        # Those without exchange have no cost to draw.
        if "compute" in row.name:
            continue
        assert charts.title(row.name)
        ours = charts.kind(row.name) in ("default", "ours")
        assert ours == row.ours, row.name


def test_curves(saved):
    pytest.importorskip("sklearn")
    curves = {
        "tower": ([0, 1, 2], [2.0, 1.5, 1.25]),
        "parameter-server": ([0, 1, 2], [2.0, 1.6, 1.5]),
        "async": ([0, 1, 2], [2.0, 0.5, 0.25]),
    }
    figure = example("async_vs_sync").draw(curves, "a processor, 2 cores")
    texts = saved(figure)
    legend = [text.get_text() for text in figure.axes[0].get_legend().texts]
    assert legend == [
        "AsyncTowerStrategy, does not wait: 0.25",
        "TowerStrategy (the default), waits: 1.25",
        "ParameterServerTowerStrategy, waits: 1.50",
    ]
    assert any("a processor, 2 cores" in text for text in texts)


def traced(*names, steps=8, numbered=True):
    """A trace of steps, one behind the other on two towers."""
    rows = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": t,
            "args": {"name": f"tower {t}"},
        }
        for t in (0, 1)
    ]
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": 0,
            "tid": s % 2,
            "ts": 1e3 * s,
            "dur": 900,
            "args": {"step": s} if numbered else {},
        }
        for s in range(steps)
        for name in names
    ]
    return {"traceEvents": [*rows, *events]}


@pytest.mark.parametrize("numbered", [True, False], ids=["common", "own"])
def test_timelines_of_steps_in_common_and_of_own_ones(saved, numbered):
    plot = example("plot_timeline")
    trace = traced("compute" if numbered else "step", numbered=numbered)
    figure = plot.draw(trace, 3)
    assert len(figure.axes[0].patches) == 3
    assert "tower 1" in saved(figure)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_timeline_of_too_few_steps_is_refused(steps):
    plot = example("plot_timeline")
    with pytest.raises(plot.typer.BadParameter, match="fewer than two steps"):
        plot.draw(traced("compute", steps=steps), 3)
