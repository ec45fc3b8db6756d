"""A first sum that works, fails, hangs, or adds up wrongly."""

import threading

import pytest
import tensorflow as tf

from keras_towers.foundation import settings, system
from keras_towers.transport import nccl_trial

pytestmark = pytest.mark.core


@pytest.fixture
def in_a_second(monkeypatch):
    """A limit of a second, and a process that need not end for it."""
    monkeypatch.setenv(settings.ENV_NCCL_TIMEOUT, "1")
    monkeypatch.setattr(system, "limit_teardown", lambda: None)


def raises():
    raise tf.errors.InternalError(None, None, "NCCL: unhandled system error")


def test_each_end_of_a_first_sum(in_a_second):
    hangs = threading.Event()
    for totals, why in (
        (lambda: [[3.0, 5.0], [3.0, 5.0]], ""),
        (raises, "InternalError: NCCL: unhandled system error"),
        (hangs.wait, "a first sum has not ended after 1 s"),
        (
            lambda: [[3.0, 5.0], [3.0, 4.0]],
            "a first sum is [[3.0, 5.0], [3.0, 4.0]] instead of [3.0, 5.0]",
        ),
    ):
        assert nccl_trial.failure_of(totals, 2) == why
    hangs.set()


def test_nccl_can_be_turned_off(monkeypatch):
    monkeypatch.setenv(settings.ENV_NCCL_TIMEOUT, "0")
    assert "is 0" in nccl_trial.failure_of(raises, 2)
