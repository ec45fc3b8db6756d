"""The arithmetic of the benchmark's tables."""

import pytest

from keras_towers.cli.bench_runner import Job, Sample
from keras_towers.cli.bench_summary import (
    Spread,
    best_stock,
    ratio,
    summarize_adoption,
    summarize_training,
)


def training(strategy, repeat, step_ms, towers=2, epoch_cost_s=0.1, **result):
    job = Job("training", "small", strategy, towers, repeat)
    result |= {"step_ms": step_ms, "epoch_cost_s": epoch_cost_s}
    return Sample(job, result)


def rows_by_strategy(samples):
    return {row.strategy: row for row in summarize_training(samples)}


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
    assert best_stock(medians) == "stock-one-device"
    assert best_stock({"plain": {0: 1.0}}) is None


def test_rows_take_the_median_step_of_a_run_then_of_the_repeats():
    rows = rows_by_strategy(
        [
            training("plain", 0, [1.0, 2.0, 90.0]),
            training("stock-default", 0, [4.0]),
            training("stock-one-device", 0, [3.0]),
            training("towers", 0, [1.5], mode="cpu"),
            training("plain", 1, [4.0]),
            training("stock-default", 1, [6.0]),
            training("stock-one-device", 1, [5.0]),
            training("towers", 1, [6.0], mode="cpu"),
        ]
    )
    assert list(rows) == [
        "plain",
        "stock-default",
        "stock-one-device",
        "towers",
    ]
    assert rows["plain"].step_ms == Spread(3.0, 2.0, 4.0)
    towers = rows["towers"]
    assert towers.mode == "cpu"
    assert towers.best_stock == "stock-one-device"
    assert towers.to_plain == Spread(1.125, 0.75, 1.5)
    assert towers.to_stock_default == Spread(0.6875, 0.375, 1.0)
    assert towers.to_best_stock == Spread(
        pytest.approx(0.85), 0.5, pytest.approx(1.2)
    )
    assert not towers.failed


def test_rows_are_compared_only_within_a_number_of_towers():
    rows = summarize_training(
        [
            training("plain", 0, [1.0], towers=2),
            training("towers", 0, [3.0], towers=4),
        ]
    )
    assert [row.towers for row in rows] == [2, 4]
    assert rows[1].to_plain is None


def test_failed_row_keeps_what_it_measured_before():
    failure = Sample(Job("training", "small", "towers", 2, 1), error="broke")
    rows = rows_by_strategy(
        [
            training("plain", 0, [1.0]),
            training("towers", 0, [2.0]),
            training("plain", 1, [1.0]),
            failure,
        ]
    )
    assert rows["towers"].failed
    assert rows["towers"].to_plain == Spread(2.0, 2.0, 2.0)
    assert not rows["plain"].failed


def test_row_that_only_failed_has_no_numbers():
    failure = Sample(Job("training", "small", "towers", 2, 0), error="broke")
    row = rows_by_strategy([failure])["towers"]
    assert row.failed
    assert row.step_ms is None
    assert row.epoch_cost_s is None
    assert row.to_plain is None


def test_adoption_tells_the_first_time_apart():
    job = Job("adoption", "adoption", "towers", 2, 0)
    result = {
        "bytes": 100_000_000,
        "adopt_s": [9.0, 1.0, 3.0, 2.0],
        "release_s": [1.0, 2.0, 3.0, 4.0],
        "copy_s": [0.5, 0.5, 0.25, 0.75],
    }
    broken = Sample(Job("adoption", "adoption", "towers", 4, 0), error="broke")
    first, failed = summarize_adoption([Sample(job, result), broken])
    assert first.megabytes == 100
    assert first.first_adopt_s == 9.0
    assert first.adopt_s == 2.0
    assert first.release_s == 2.5
    assert first.copy_s == 0.5
    assert failed.failed
    assert failed.adopt_s is None
