"""What a worker of the benchmark measures of one strategy."""

import pytest

from keras_towers.cli import bench_strategies, bench_worker


@pytest.mark.parametrize("strategy", bench_strategies.NAMED)
def test_strategies_by_name_are_rows(strategy, devices):
    assert strategy in bench_strategies.DEFAULT_STRATEGIES
    measured = bench_worker.measure_training("small", strategy, devices[:2], 4)
    assert len(measured["step_ms"]) == 4
    assert all(ms > 0 for ms in measured["step_ms"])
    assert 0 < measured["loss"] < 10
