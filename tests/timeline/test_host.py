"""The times of Keras's loop, by a clock that is set by hand."""

import types

import numpy as np
import pytest

from keras_towers.timeline import host as host_lib

pytestmark = pytest.mark.core


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=0.0, traces=0)
    fake = types.SimpleNamespace(time=lambda: clock.now)
    monkeypatch.setattr(host_lib, "time", fake)
    return clock


def run(host, clock, calls, step=1.0, callbacks=0.5, traces=False):
    for _ in range(calls):
        host.begin_call()
        clock.traces += traces
        clock.now += step
        host.on_train_batch_end(0)
        clock.now += callbacks
        host.end_callbacks()


def test_the_parts_of_fit(clock):
    host = host_lib.Host(100, lambda: clock.traces)
    clock.now += 3
    for epoch in range(2):
        run(host, clock, 1, step=9, traces=epoch == 0)
        run(host, clock, 3)
        host.on_test_begin()
        clock.now += 4 - epoch
        host.on_test_end()
        host.on_epoch_end(epoch)
        clock.now += 0.25
        host.on_epoch_begin(epoch + 1)
        clock.now += 0.125
    host.end_fit()
    assert host.seconds == {
        "start": 3,
        "steps": 9.5 + 6 * 1.5,
        "tracing": 9.5,
        "validation": 7,
        "ends of epochs": 0.5,
        "between epochs": 0.25,
    }
    assert host.first_validation == 4
    assert host.whole == sum(host.seconds.values()) == clock.now
    assert (host.count, host.traces, list(host.traced)) == (8, 1, [3])


def test_only_the_last_calls_are_kept_and_all_are_in_the_sums(clock):
    host = host_lib.Host(3)
    run(host, clock, 10)
    host.on_epoch_end(0)
    clock.now += 50  # of callbacks behind the epoch, not behind a batch
    calls = host.calls()
    assert calls.begins.tolist() == [7 * 1.5, 8 * 1.5, 9 * 1.5]
    np.testing.assert_array_equal(calls.nexts - calls.ends, [0.5] * 3)
    assert (host.count, host.seconds["steps"]) == (10, 15)
