"""Updates that begin before their gradients: who is waited for, and returns."""

import itertools
import threading
import time

import pytest
import tensorflow as tf

from keras_towers.parameter_servers.early_updates import (
    EarlyCoordinator,
    EarlyGroup,
)
from keras_towers.parameter_servers.remote import Running
from keras_towers.replicas.averages import arguments
from keras_towers.replicas.group import Event
from keras_towers.replicas.quorum import Quorum
from keras_towers.replicas.resources import flat, free

DEVICE = "/device:CPU:0"
SECONDS = 60
_numbers = itertools.count()


class Played:
    """Replicas that the test plays, and their coordinator."""

    def __init__(self, replicas, fails=False):
        self._name = f"tests/early_{next(_numbers)}"
        self._quorum = Quorum(replicas, replicas, False)
        self._fails = fails
        self._groups = [self._group_of(replica) for replica in range(replicas)]
        self.group = self._groups[0]
        self.group.initialise()
        self.group.calls("begin", self.group.begin)
        self.first = self.group.global_step()
        for replica, group in enumerate(self._groups):
            group.calls("first", lambda g=group, r=replica: g.start_first(r))
        self.errors = []
        self.coordinator = EarlyCoordinator(
            self.group.run_by(flat), self._apply, self.errors.append
        )
        self.coordinator.start()

    def _group_of(self, replica):
        return EarlyGroup(self._name, DEVICE, self._quorum, replica)

    def _apply(self, count, tokens):
        def update(count, tokens):
            arrived = self.group.take(count)
            with tf.control_dependencies([arrived]):
                most = tf.constant(0 if self._fails else 100, tf.int64)
                fine = tf.debugging.assert_less(tf.reduce_max(arrived), most)
                with tf.control_dependencies([fine]):
                    advanced = self.group.advance(tokens)
            with tf.control_dependencies([advanced]):
                return tf.identity(arrived)

        given = arguments(count, tokens)
        made = tf.function(update, autograph=False)
        return Running(made.get_concrete_function(*given), given)

    def push(self, *replicas):
        """Push the gradients of replicas that have read their weights."""
        for replica in replicas:
            self._groups[replica].calls(
                "arrive", lambda r=replica: self._groups[r].arrive(r)
            )

    def reads(self, *replicas):
        """Wait for the next weights of each; return the steps since begin."""
        return [self._read(replica) for replica in replicas]

    def _read(self, replica):
        found, group = [], self._groups[replica]

        def wait():
            found.extend(group.calls("wait", lambda: group.wait(replica)))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert found, f"no weights for replica {replica}"
        return int(found[0]) - self.first

    def returns(self, replica):
        """Come back; return how many gradients the replica had pushed."""
        self._groups[replica] = group = self._group_of(replica)
        group.enter(replica)
        return group.pushed(replica)

    def settle(self):
        """Wait until what has been told is handled."""
        self.coordinator.settle(Event.ASKED)

    def end(self):
        """End the coordinator, which has not failed."""
        self.coordinator.end()
        assert not self.coordinator.is_alive()
        assert not self.errors
        free(self._name)


def test_an_update_waits_for_all_who_have_not_left():
    game = Played(3)
    game.push(0, 1, 2)
    assert game.reads(0, 1, 2) == [1, 1, 1]
    game.push(0, 1)
    game.settle()
    assert game.group.global_step() == game.first + 1
    game.group.send(Event.LEFT, 2)
    assert game.reads(0, 1) == [2, 2]
    game.settle()
    assert game.coordinator.counts.used == (2, 2, 1)
    # The end lets replicas go.
    game.group.end_all()
    assert game.reads(0)[0] < 0
    game.end()


def test_a_replica_that_returns_goes_on_behind_what_it_had_pushed():
    game = Played(2)
    game.push(0, 1)
    # It dies before it has read its weights, and then before it has pushed.
    assert game.reads(0) == [1]
    for _ in range(2):
        assert game.returns(1) == 1
        assert game.reads(1) == [1]
    game.push(1)
    # What it had pushed is there: it waits for the next update.
    assert game.returns(1) == 2
    game.push(0)
    assert game.reads(0, 1) == [2, 2]
    game.push(0, 1)
    assert game.reads(0, 1) == [3, 3]
    game.settle()
    assert game.coordinator.counts.used == (3, 3)
    game.end()


def test_an_update_that_fails_is_noticed():
    game = Played(1, fails=True)
    game.push(0)
    game.settle()
    until = time.monotonic() + SECONDS
    while not game.coordinator._running.has_failed:
        assert time.monotonic() < until
    with pytest.raises(tf.errors.InvalidArgumentError):
        game.coordinator.check()
    game.end()
