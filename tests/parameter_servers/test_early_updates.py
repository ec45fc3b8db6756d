"""Updates that begin before their gradients: departures and restarts."""

import time

import pytest
import tensorflow as tf

from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.replicas.coordinator import EarlyCoordinator
from keras_towers.replicas.named_resources import trace
from keras_towers.replicas.replica_group import END, ReplicaEvent
from tests.replicas.game import SECONDS, Game, played


class Early(Game):
    """Replicas whose updates begin before their gradients have arrived."""

    coordinator_of = EarlyCoordinator
    early = True

    def __init__(self, replicas, fails=False):
        self._fails = fails
        super().__init__(replicas, replicas)

    def apply(self, count):
        def update(count):
            arrived = self.group.take_arrivals(count)
            with tf.control_dependencies([arrived]):
                most = tf.constant(0 if self._fails else 100, tf.int64)
                fine = tf.debugging.assert_less(tf.reduce_max(arrived), most)
                with tf.control_dependencies([fine]):
                    advanced = self.group.advance()
            with tf.control_dependencies([advanced]):
                return tf.identity(arrived)

        made = trace(update, tf.TensorSpec((), tf.int32))
        return RunningFunction(made, [tf.constant(count)])


def test_an_update_waits_for_all_replicas_that_have_not_left():
    with played(3, kind=Early) as game:
        game.push(0, 1, 2)
        assert game.wait(0, 1, 2) == [1, 1, 1]
        game.push(0, 1)
        game.settle()
        assert game.group.global_step() == game.first + 1
        game.group.send(ReplicaEvent.LEFT, 2)
        assert game.wait(0, 1) == [2, 2]
        game.settle()
        assert game.coordinator.counts.used == (2, 2, 1)
        # The end releases replicas.
        game.group.send_end_to_all()
        assert game.wait(0) == [END]


def test_no_update_follows_a_replica_that_stops_the_training():
    with played(2, kind=Early) as game:
        game.push(0, 1)
        assert game.wait(0, 1) == [1, 1]
        game.push(1)
        game.group.send(ReplicaEvent.STOPPED, 0)
        assert game.wait(1) == [END]
        game.settle()
        assert game.group.global_step() == game.first + 1


def test_a_restarted_replica_goes_on_after_its_last_gradient():
    with played(2, kind=Early) as game:
        game.push(0, 1)
        # It dies before it has read its weights, and then before it has pushed.
        assert game.wait(0) == [1]
        for _ in range(2):
            assert game.returns(1) == 1
            assert game.wait(1) == [1]
        game.push(1)
        # Its gradient has arrived: it waits for the next update.
        assert game.returns(1) == 2
        game.push(0)
        assert game.wait(0, 1) == [2, 2]
        game.push(0, 1)
        assert game.wait(0, 1) == [3, 3]
        game.settle()
        assert game.coordinator.counts.used == (3, 3)


def test_the_error_of_an_update_is_raised():
    with played(1, fails=True, kind=Early) as game:
        game.push(0)
        game.settle()
        until = time.monotonic() + SECONDS
        while not game.coordinator._running.has_failed:
            assert time.monotonic() < until
        with pytest.raises(tf.errors.InvalidArgumentError):
            game.coordinator.check_failed()
