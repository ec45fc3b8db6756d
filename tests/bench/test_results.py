"""The arithmetic of the benchmark's tables."""

import pytest

from keras_towers.bench.results import Spread, summarize, summarize_adoption
from keras_towers.bench.rows import PROCESSES, TOWERS
from tests.bench.shared import ADOPTION, samples_of

pytestmark = pytest.mark.core


def start(first_step_s, memory_mb=None, ms=1.0):
    return [
        {"step_ms": [ms], "first_step_s": first_step_s, "memory_mb": memory_mb}
    ]


def same(value):
    return (value, value, value)


# Rows, and columns of some of them: the median, the minimum and the maximum.
CASES = {
    # The ratio of medians would be 1.25.
    "median step of a run, then ratios repeat by repeat": (
        TOWERS,
        {
            "plain": [[1.0, 2.0, 90.0], [4.0]],
            "stock-default": [[4.0], [6.0]],
            "stock-one-device": [[3.0], [5.0]],
            "towers": [{"step_ms": [1.5], "mode": "cpu"}, [6.0]],
        },
        {
            "plain": {"step_ms": (3.0, 2.0, 4.0)},
            "towers": {
                "mode": "cpu",
                "best_stock": "stock-one-device",
                "to_plain": (1.125, 0.75, 1.5),
                "to_stock_default": (0.6875, 0.375, 1.0),
                "to_best_stock": (0.85, 0.5, 1.2),
                "failed": False,
            },
        },
    ),
    "best stock of medians": (
        TOWERS,
        {
            "stock-default": [[9.0], [9.0], [2.0]],
            "stock-one-device": [[5.0], [6.0], [7.0]],
            "stock-hierarchical": ["broke"],
        },
        {"stock-default": {"best_stock": "stock-one-device"}},
    ),
    "a failure keeps what was measured before": (
        TOWERS,
        {
            "plain": [[1.0], [1.0]],
            "towers": [[2.0], "broke"],
            "async": ["broke"],
        },
        {
            "plain": {"failed": False, "best_stock": None},
            "towers": {"failed": True, "to_plain": same(2.0)},
            "async": dict.fromkeys(["step_ms", "epoch_cost_s", "to_plain"])
            | {"failed": True},
        },
    ),
    "start beside the stock row that starts first": (
        TOWERS,
        {
            "plain": start(2.0, 10.0),
            "stock-default": start(8.0),
            "stock-one-device": start(4.0, ms=9.0),
            "towers": start(3.0, 5.0),
        },
        {
            "towers": {
                "first_step_s": same(3.0),
                "first_step_s_to_plain": same(1.5),
                "first_step_s_to_best_stock": same(0.75),
                "memory_mb_to_plain": same(0.5),
                "memory_mb_to_best_stock": None,
            }
        },
    ),
    "cost above compute of the same repeat, of one framework": (
        PROCESSES,
        {
            "compute": [[10.0], [20.0]],
            "horovod-raw": [[30.0], [30.0]],
            "strategy": [{"step_ms": [15.0], "how": "shared memory"}, [22.0]],
            "torch-compute": [[20.0]],
            "torch-ddp": [{"step_ms": [30.0], "epoch_cost_s": None}],
        },
        {
            "compute": {"cost_ms": None, "to_raw": None},
            "horovod-raw": {"cost_ms": (15.0, 10.0, 20.0)},
            "strategy": {
                "step_ms": (18.5, 15.0, 22.0),
                "cost_ms": (3.5, 2.0, 5.0),
                "to_raw": (0.225, 0.2, 0.25),
                "how": "shared memory",
            },
            "torch-compute": {"cost_ms": None},
            "torch-ddp": {"cost_ms": same(10.0), "to_raw": same(0.5)}
            | {"epoch_cost_s": None},
        },
    ),
    "nothing is divided by a cost that noise hides": (
        PROCESSES,
        {"compute": [[10.0]], "horovod-raw": [[9.0]], "strategy": [[12.0]]},
        {"strategy": {"cost_ms": same(2.0), "to_raw": None}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_columns(name):
    suite, rows, wanted = CASES[name]
    results = summarize(suite, samples_of(suite, rows))
    assert [result[suite.row_key] for result in results] == list(rows)
    found = {result[suite.row_key]: result for result in results}
    for row, columns in wanted.items():
        for column, value in columns.items():
            if isinstance(value, tuple):
                value = Spread(*map(pytest.approx, value))
            assert found[row][column] == value, (row, column)


def test_rows_are_compared_only_within_a_number_of_towers():
    two = samples_of(TOWERS, {"plain": [[1.0]]}, 2)
    four = samples_of(TOWERS, {"towers": [[3.0]]}, 4)
    rows = summarize(TOWERS, [*two, *four])
    assert [row["towers"] for row in rows] == [2, 4]
    assert rows[1]["to_plain"] is None


def test_adoption_tells_the_first_time_apart():
    first, failed = summarize_adoption(ADOPTION)
    of = {"towers": 2, "strategy": "towers", "megabytes": 100, "copy_s": 0.5}
    seconds = {"first_adopt_s": 9.0, "adopt_s": 2.0, "release_s": 2.5}
    assert first == {**of, **seconds, "failed": False}
    assert failed["failed"]
    assert failed["adopt_s"] is None
