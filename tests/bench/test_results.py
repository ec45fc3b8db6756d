"""The arithmetic of the benchmark's tables."""

import pytest

from keras_towers.bench.plan import Cell
from keras_towers.bench.results import (
    Spread,
    best_stock,
    ratio,
    summarize,
    summarize_adoption,
)
from keras_towers.bench.rows import PROCESSES, TOWERS
from keras_towers.bench.runner import Sample

pytestmark = pytest.mark.core


def training(row, repeat, step_ms, towers=2, **result):
    cell = Cell("training", "small", row, towers, repeat)
    result |= {"step_ms": step_ms, "epoch_cost_s": 0.1}
    return Sample(cell, result)


def failure(repeat):
    cell = Cell("training", "small", "towers", 2, repeat)
    return Sample(cell, error="broke")


def process(row, repeat, ms, processes=2, **more):
    cell = Cell("processes", "large", row, processes, repeat)
    return Sample(cell, {"step_ms": [ms], "epoch_cost_s": 0.1, **more})


def results_of(suite, samples):
    return {r[suite.row_key]: r for r in summarize(suite, samples)}


def test_spread_is_the_median_and_the_range():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_ratio_divides_repeat_by_repeat():
    # The medians' ratio would be 1; each repeat by itself says otherwise.
    assert ratio({0: 1.0, 1: 4.0}, {0: 2.0, 1: 3.0}) == Spread(
        pytest.approx((0.5 + 4 / 3) / 2), 0.5, pytest.approx(4 / 3)
    )


def test_ratio_leaves_out_repeats_that_one_row_lacks():
    assert ratio({0: 1.0, 1: 9.0}, {0: 2.0}) == Spread(0.5, 0.5, 0.5)
    assert ratio({0: 1.0}, {}) is None
    assert ratio({}, {0: 1.0}) is None


def test_best_stock_is_the_smallest_median_among_stock():
    medians = {
        "plain": {0: 1.0},
        "stock-default": {0: 9.0, 1: 9.0, 2: 2.0},
        "stock-one-device": {0: 5.0, 1: 6.0, 2: 7.0},
        "stock-hierarchical": {},
    }
    assert best_stock(TOWERS, medians) == "stock-one-device"
    assert best_stock(TOWERS, {"plain": {0: 1.0}}) is None


def test_rows_take_the_median_step_of_a_run_then_of_the_repeats():
    rows = results_of(
        TOWERS,
        [
            training("plain", 0, [1.0, 2.0, 90.0]),
            training("stock-default", 0, [4.0]),
            training("stock-one-device", 0, [3.0]),
            training("towers", 0, [1.5], mode="cpu"),
            training("plain", 1, [4.0]),
            training("stock-default", 1, [6.0]),
            training("stock-one-device", 1, [5.0]),
            training("towers", 1, [6.0], mode="cpu"),
        ],
    )
    assert list(rows) == [
        "plain",
        "stock-default",
        "stock-one-device",
        "towers",
    ]
    assert rows["plain"]["step_ms"] == Spread(3.0, 2.0, 4.0)
    towers = rows["towers"]
    assert towers["mode"] == "cpu"
    assert towers["best_stock"] == "stock-one-device"
    assert towers["to_plain"] == Spread(1.125, 0.75, 1.5)
    assert towers["to_stock_default"] == Spread(0.6875, 0.375, 1.0)
    assert towers["to_best_stock"] == Spread(
        pytest.approx(0.85), 0.5, pytest.approx(1.2)
    )
    assert not towers["failed"]


def test_start_is_compared_with_the_stock_row_that_starts_first():
    rows = results_of(
        TOWERS,
        [
            training("plain", 0, [1.0], first_step_s=2.0, memory_mb=10.0),
            training("stock-default", 0, [1.0], first_step_s=8.0),
            training("stock-one-device", 0, [9.0], first_step_s=4.0),
            training("towers", 0, [1.0], first_step_s=3.0, memory_mb=5.0),
        ],
    )
    towers = rows["towers"]
    assert towers["first_step_s"] == Spread(3.0, 3.0, 3.0)
    assert towers["first_step_s_to_plain"] == Spread(1.5, 1.5, 1.5)
    assert towers["first_step_s_to_best_stock"] == Spread(0.75, 0.75, 0.75)
    assert towers["memory_mb_to_plain"] == Spread(0.5, 0.5, 0.5)
    assert towers["memory_mb_to_best_stock"] is None


def test_rows_are_compared_only_within_a_number_of_towers():
    rows = summarize(
        TOWERS,
        [
            training("plain", 0, [1.0], towers=2),
            training("towers", 0, [3.0], towers=4),
        ],
    )
    assert [row["towers"] for row in rows] == [2, 4]
    assert rows[1]["to_plain"] is None


def test_failed_row_keeps_what_it_measured_before():
    rows = results_of(
        TOWERS,
        [
            training("plain", 0, [1.0]),
            training("towers", 0, [2.0]),
            training("plain", 1, [1.0]),
            failure(1),
        ],
    )
    assert rows["towers"]["failed"]
    assert rows["towers"]["to_plain"] == Spread(2.0, 2.0, 2.0)
    assert not rows["plain"]["failed"]


def test_row_that_only_failed_has_no_numbers():
    row = results_of(TOWERS, [failure(0)])["towers"]
    assert row["failed"]
    assert row["step_ms"] is None
    assert row["epoch_cost_s"] is None
    assert row["to_plain"] is None


def test_adoption_tells_the_first_time_apart():
    cell = Cell("adoption", "adoption", "towers", 2, 0)
    result = {
        "bytes": 100_000_000,
        "adopt_s": [9.0, 1.0, 3.0, 2.0],
        "release_s": [1.0, 2.0, 3.0, 4.0],
        "copy_s": [0.5, 0.5, 0.25, 0.75],
    }
    broken = Sample(Cell("adoption", "adoption", "towers", 4, 0), error="broke")
    first, failed = summarize_adoption([Sample(cell, result), broken])
    assert first["megabytes"] == 100
    assert first["first_adopt_s"] == 9.0
    assert first["adopt_s"] == 2.0
    assert first["release_s"] == 2.5
    assert first["copy_s"] == 0.5
    assert failed["failed"]
    assert failed["adopt_s"] is None


def test_cost_is_above_compute_of_the_same_repeat():
    rows = results_of(
        PROCESSES,
        [
            process("compute", 0, 10.0),
            process("horovod-raw", 0, 30.0),
            process("strategy", 0, 15.0, how="shared memory"),
            process("compute", 1, 20.0),
            process("horovod-raw", 1, 30.0),
            process("strategy", 1, 22.0, how="shared memory"),
        ],
    )
    assert rows["compute"]["cost_ms"] is None
    assert rows["compute"]["to_raw"] is None
    assert rows["horovod-raw"]["cost_ms"] == Spread(15.0, 10.0, 20.0)
    assert rows["strategy"]["step_ms"] == Spread(18.5, 15.0, 22.0)
    assert rows["strategy"]["cost_ms"] == Spread(3.5, 2.0, 5.0)
    assert rows["strategy"]["to_raw"] == Spread(0.225, 0.2, 0.25)
    assert rows["strategy"]["how"] == "shared memory"


def test_torch_is_compared_with_torch():
    rows = results_of(
        PROCESSES,
        [
            process("compute", 0, 10.0),
            process("horovod-raw", 0, 14.0),
            process("torch-compute", 0, 20.0, epoch_cost_s=None),
            process("torch-ddp", 0, 26.0, epoch_cost_s=None),
        ],
    )
    assert rows["torch-compute"]["cost_ms"] is None
    assert rows["torch-ddp"]["cost_ms"] == Spread(6.0, 6.0, 6.0)
    assert rows["torch-ddp"]["to_raw"] == Spread(1.5, 1.5, 1.5)
    assert rows["torch-ddp"]["epoch_cost_s"] is None


def test_nothing_is_divided_by_a_cost_that_noise_hides():
    rows = results_of(
        PROCESSES,
        [
            process("compute", 0, 10.0),
            process("horovod-raw", 0, 9.0),
            process("strategy", 0, 12.0),
        ],
    )
    assert rows["strategy"]["cost_ms"] == Spread(2.0, 2.0, 2.0)
    assert rows["strategy"]["to_raw"] is None


def test_rows_of_other_numbers_of_processes_are_not_compared():
    rows = results_of(
        PROCESSES,
        [
            process("compute", 0, 10.0, processes=4),
            process("strategy", 0, 12.0),
        ],
    )
    assert rows["strategy"]["cost_ms"] is None
