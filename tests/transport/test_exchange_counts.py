"""What a graph exchanges counts from when it is sent until it has arrived."""

import functools

import pytest
import tensorflow as tf

from keras_towers.jobs.rendezvous import activity
from keras_towers.transport.exchange_counts import counted
from tests.kit.leaving import Boom
from tests.kit.processes import wait_until


@pytest.fixture
def counts(monkeypatch):
    """Those of this test."""
    own = activity.ExchangeCounts()
    monkeypatch.setattr(activity.this_rank, "exchanges", own)
    return own


def test_a_graph_counts_each_exchange_and_not_what_it_computes(counts):
    def during(running, tensors):
        """What takes until these exchanges run."""

        def act(value):
            # A count may be read before it is written.
            assert wait_until(lambda: counts.read()[2] == running)
            return value

        return [tf.py_function(act, [t], t.dtype) for t in tensors]

    @tf.function(autograph=False)
    def step(value):
        values = during([], [value])
        for name in ("test.sum", "test.gather"):
            exchange = functools.partial(during, [name])
            values = during([], counted(name, exchange, values))
        return values[0]

    for done in (1, 2):
        assert step(tf.constant(3.0)) == 3
        begun = {"test.sum": done, "test.gather": done}
        assert counts.read() == (begun, [], [])


def test_python_counts_its_own_also_if_they_fail(counts):
    def fails(sent):
        assert counts.read() == ({"test.names": 1}, ["test.names"], [])
        raise Boom

    with pytest.raises(Boom):
        counted("test.names", fails, [tf.constant(1)])
    assert counts.read() == ({"test.names": 1}, [], [])


def test_an_exchange_that_was_cancelled_runs_until_the_next_one(counts):
    @tf.function(autograph=False)
    def step(value):
        def checked(sent):
            with tf.control_dependencies(
                [tf.debugging.Assert(value > 0, [""])]
            ):
                return [tf.identity(tensor) for tensor in sent]

        return counted("test.checked", checked, [value])[0]

    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(0))
    assert counts.read() == ({"test.checked": 1}, [], ["test.checked"])
    step(tf.constant(1))
    assert counts.read() == ({"test.checked": 2}, [], [])
