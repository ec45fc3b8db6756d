"""What the benchmark makes of the times of batches."""

import pytest

from keras_towers.cli import bench_timing


def test_differences_between_one_batch_and_the_next():
    assert bench_timing.differences([1.0, 3.0, 6.0]) == [2.0, 3.0]
    assert bench_timing.differences([1.0]) == []


def test_bursts_of_asynchronous_towers_are_a_rate_over_some_rounds():
    # Four towers take their batches at once, every two seconds.
    times = [2.0 * step for step in range(10) for _ in range(4)]
    assert bench_timing.differences(times, over=12) == pytest.approx([0.5] * 28)
