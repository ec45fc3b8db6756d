"""Updates that begin before their gradients come: who they wait for."""

import itertools
import threading
import time

import pytest
import tensorflow as tf

from keras_towers.parameter_servers.remote import Running
from keras_towers.replicas import Rounds
from keras_towers.replicas.averages import arguments
from keras_towers.replicas.coordinator import EarlyCoordinator
from keras_towers.replicas.group import Event, Group
from keras_towers.replicas.resources import flat

DEVICE = "/device:CPU:0"
SECONDS = 60
_numbers = itertools.count()


class Early:
    """A group of replicas, played by the test, and its coordinator."""

    def __init__(self, replicas, fails=False):
        name = f"tests/early_{next(_numbers)}"
        rounds = Rounds(replicas, replicas, False)
        self.group = Group(name, DEVICE, rounds, early=True)
        self.group.initialise()
        self.group.calls("begin", self.group.begin)
        self.first = self.group.global_step()
        for replica in range(replicas):
            self.group.tell(Event.STARTED, replica)
            self.group.calls(
                ("s", replica), lambda r=replica: self.group.start(r)
            )
        self.errors = []
        self.fails = fails
        self.coordinator = EarlyCoordinator(
            self.group.by(flat), self._begin, self.errors.append
        )
        self.coordinator.start()

    def _begin(self, count, tokens):
        def update(count, tokens):
            arrived = self.group.take(count)
            with tf.control_dependencies([arrived]):
                most = tf.constant(0 if self.fails else 100, tf.int64)
                fine = tf.debugging.assert_less(tf.reduce_max(arrived), most)
                with tf.control_dependencies([fine]):
                    advanced = self.group.advance(tokens)
            with tf.control_dependencies([advanced]):
                return tf.identity(arrived)

        given = arguments(count, tokens)
        made = tf.function(update, autograph=False)
        return Running(made.get_concrete_function(*given), given)

    def push(self, *replicas):
        for replica in replicas:
            self.group.calls(
                ("a", replica), lambda r=replica: self.group.arrive(r)
            )

    def tokens(self, *replicas):
        """Wait for a token of each; return their numbers."""
        found = []
        for replica in replicas:

            def wait(replica=replica):
                body = lambda: self.group.wait(replica)  # noqa: E731
                found.extend(map(int, self.group.calls(("w", replica), body)))

            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            thread.join(SECONDS)
        assert len(found) == len(replicas)
        return [token - self.first for token in found]

    def settle(self):
        self.coordinator.settle(Event.ASKED)


@pytest.fixture
def early():
    made = []

    def make(replicas):
        made.append(Early(replicas))
        return made[-1]

    yield make
    for each in made:
        each.coordinator.end()
        each.group.destroy()
        assert not each.coordinator.is_alive()
        assert not each.errors


def test_an_update_waits_for_all_who_have_not_left(early):
    game = early(3)
    game.push(0, 1, 2)
    assert game.tokens(0, 1, 2) == [1, 1, 1]
    game.push(0, 1)
    game.settle()
    assert game.group.global_step() == game.first + 1
    game.group.tell(Event.LEFT, 2)
    assert game.tokens(0, 1) == [2, 2]
    # One that has left and comes back joins the next update.
    game.group.enter(2)
    game.push(0)
    game.settle()
    game.push(1)
    assert game.tokens(0, 1, 2) == [3, 3, 3]
    game.push(0, 1)
    game.settle()
    assert game.group.global_step() == game.first + 3
    game.push(2)
    assert game.tokens(0, 1, 2) == [4, 4, 4]
    game.settle()
    assert game.coordinator.counts.used == (4, 4, 2)
    for replica in range(3):
        game.group.tell(Event.LEFT, replica)
    game.settle()
    # When all have left, one that comes back goes on alone.
    game.group.enter(1)
    assert game.tokens(1) == [4]
    game.push(1)
    assert game.tokens(1) == [5]


def test_a_replica_that_returns_goes_on_behind_what_it_had_pushed(early):
    game = early(2)
    game.push(0, 1)
    # It dies before it has its token, and then before it has pushed.
    assert game.tokens(0) == [1]
    for _ in range(2):
        assert game.group.pushed(1) == 1
        game.group.enter(1)
        assert game.tokens(1) == [1]
    game.push(1)
    # What it had pushed is there: it waits for the next update.
    game.group.enter(1)
    game.settle()
    assert game.group.pushed(1) == 2
    game.push(0)
    assert game.tokens(0, 1) == [2, 2]
    # A token too many is not used.
    game.group.enter(1)
    game.settle()
    game.group.enter(1)
    assert game.tokens(1) == [2]
    game.push(0, 1)
    assert game.tokens(0, 1) == [3, 3]
    game.settle()
    assert game.coordinator.counts.used == (3, 3)


def test_an_update_that_fails_is_noticed():
    game = Early(1, fails=True)
    game.push(0)
    game.settle()
    until = time.monotonic() + SECONDS
    while not game.coordinator._running.has_failed:
        assert time.monotonic() < until
    with pytest.raises(tf.errors.InvalidArgumentError):
        game.coordinator.check()
    game.coordinator.end()
