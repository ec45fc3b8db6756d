"""The coordinator: who is waited for, who gets tokens, and what is counted.

Replicas are played by the test; an update takes what they have pushed.
"""

import contextlib
import itertools
import threading

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.replicas import Coordinator, Group
from keras_towers.replicas.events import Event
from keras_towers.replicas.quotas import quotas
from tests.kit.leaving import Boom

DEVICE = "/device:CPU:0"
SECONDS = 60
_numbers = itertools.count()


class Played:
    """A group of replicas, and its coordinator.

    Attributes:
        updates: the number of gradients in each update.
    """

    def __init__(self, replicas, aggregate, shared=False, limit_s=None):
        name = f"tests/coordinator_{next(_numbers)}"
        self.group = Group(name, DEVICE, replicas, aggregate, shared)
        self.group.initialise()
        self.updates = []
        self.errors = []
        self.coordinator = Coordinator(
            self.group, self.apply, self.errors.append, limit_s=limit_s
        )
        self.step = {}
        for replica in range(replicas):
            self.group.tell(Event.JOINED, replica)
            self.step[replica] = self.group.global_step()
        self.coordinator.start()

    def apply(self, count, tokens):
        @tf.function(autograph=False)
        def take():
            return self.group.take(tf.constant(count))

        @tf.function(autograph=False)
        def advance():
            self.group.advance(tf.constant(tokens, tf.int32))

        averaged = take().numpy().tolist()
        self.updates.append(sum(averaged))
        advance()
        return averaged

    def push(self, *replicas, tells=True):
        """Push the gradients of replicas that have a token."""

        @tf.function(autograph=False)
        def arrive(replica):
            step = tf.constant(self.step[replica], tf.int64)
            if tells:
                self.group.arrive(replica, step)
                return
            size = self.group.replicas
            tf.raw_ops.ResourceAccumulatorApplyGradient(
                handle=self.group._complete,
                local_step=step,
                gradient=tf.one_hot(replica, size, dtype=tf.float64),
            )

        for replica in replicas:
            arrive(replica)

    def tokens(self, *replicas):
        """Wait for a token of each; return their numbers."""
        return [self._token(replica) for replica in replicas]

    def _token(self, replica):
        found = []

        def wait():
            body = lambda: self.group.get_token(replica)  # noqa: E731
            found.append(int(self.group.call(("token", replica), body)))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert found, f"no token for replica {replica}"
        self.step[replica] = max(found[0], self.group.global_step())
        return found[0]

    def counts(self):
        """Return the counts once what has been told is handled."""
        self.coordinator.flush()
        return self.coordinator.counts

    def has_token(self, replica):
        queue = self.group._tokens[replica]
        return int(tf.raw_ops.QueueSizeV2(handle=queue._handle)) > 0


@contextlib.contextmanager
def played(*args, **kwargs):
    found = Played(*args, **kwargs)
    try:
        yield found
    finally:
        found.coordinator.end()
        found.group.destroy()
    assert not found.coordinator.is_alive()
    assert not found.errors


def test_quotas():
    assert quotas(3, 4) == [1, 1, 1, 1]
    assert quotas(4, 4) == [1, 1, 1, 1]
    assert quotas(5, 2) == [3, 2]


def test_replicas_that_have_left_are_not_waited_for():
    with played(3, 3) as game:
        game.push(0, 1)
        game.group.tell(Event.LEFT, 2)
        assert game.tokens(0) == [1]
        assert game.updates == [2]
        assert game.tokens(1) == [1]
        game.group.tell(Event.LEFT, 1)
        game.push(0)
        assert game.tokens(0) == [2]
        # The end lets replicas go.
        game.group.end(1)
        assert game.tokens(1)[0] < 0


def test_a_replica_that_returns_goes_on_behind_what_it_had_pushed():
    with played(2, 2) as game:
        game.push(0, 1)
        assert game.tokens(0, 1) == [1, 1]
        game.push(1)
        assert game.group.come_back(1) == 2
        # Its gradient is there already: it waits for the next update.
        game.coordinator.wait()
        assert not game.has_token(1)
        game.push(0)
        assert game.tokens(0, 1) == [2, 2]
        # Now it dies before it has pushed.
        assert game.group.come_back(1) == 2
        assert game.tokens(1) == [2]
        game.push(0, 1)
        assert game.tokens(0) == [3]
        assert game.updates == [2, 2, 2]
        assert game.counts().used == (3, 3)


def test_a_gradient_of_which_a_replica_that_died_did_not_tell():
    with played(2, 2) as game:
        game.push(1, tells=False)
        assert game.group.come_back(1) == 0
        assert game.tokens(1) == [0]
        game.push(1, 0)
        assert game.tokens(0, 1) == [1, 1]
        game.push(0, 1)
        # It is counted, and nobody waits for its arrival.
        assert game.tokens(0, 1) == [2, 2]
        assert game.updates == [3, 2]


def test_a_lost_replica_is_waited_for_only_if_there_are_none_to_spare():
    for replicas in (2, 3):
        with played(replicas, 2) as game:
            game.group.tell(Event.LOST, replicas - 1)
            game.push(0)
            game.coordinator.wait()
            assert game.updates == []
            if replicas == 2:
                continue
            game.group.tell(Event.LEFT, 1)
            assert game.tokens(0) == [1]
            game.push(0)
            assert game.tokens(0) == [2]
            # One that goes on is waited for again.
            game.step[2] = 2
            game.push(2, 0)
            assert game.tokens(0, 2) == [3, 3]
            game.push(0)
            game.coordinator.wait()
            assert game.updates == [1, 1, 2]


def test_a_thread_that_hangs_is_not_waited_for():
    game = Played(1, 1, limit_s=0.5)
    free = threading.Event()
    game.coordinator._apply = lambda count, tokens: free.wait(60) and []
    game.push(0)
    for wait in (game.coordinator.flush, game.coordinator.end):
        with pytest.raises(TowerError, match="has not been applied for 0.5 s"):
            wait()
    free.set()
    game.coordinator.join(SECONDS)
    assert not game.coordinator.is_alive()


def test_an_error_ends_it():
    def fail(count, tokens):
        raise Boom

    game = Played(1, 1)
    game.coordinator._apply = fail
    game.push(0)
    game.coordinator.join(SECONDS)
    assert not game.coordinator.is_alive()
    (error,) = game.errors
    assert isinstance(error, Boom)
    # Nobody waits for what will not come.
    game.coordinator.flush()
    game.coordinator.end()
