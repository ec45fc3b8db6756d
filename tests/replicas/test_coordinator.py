"""The coordinator: who is waited for, who gets tokens, and what is counted.

Replicas are played by the test; an update takes what they have pushed.
"""

import contextlib
import functools
import itertools
import threading

import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.group import Event, Group
from keras_towers.replicas.quorum import Quorum
from keras_towers.replicas.resources import flat, free
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
        self.name = f"tests/coordinator_{next(_numbers)}"
        quorum = Quorum(replicas, aggregate, shared)
        self.group = Group(self.name, DEVICE, quorum)
        self.group.initialise()
        self.updates = []
        self.errors = []
        self.group.calls("begin", self.group.begin)
        self.first = self.group.global_step()
        for replica in range(replicas):
            self.group.send(Event.STARTED, replica)
            self.start(replica)
        # It waits in a thread of its own.
        self.coordinator = Coordinator(
            self.group.run_by(flat),
            self.apply,
            self.errors.append,
            limit_s=limit_s,
        )
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

    def start(self, replica):
        """Begin to compute a gradient, with the weights there are now."""
        self.group.calls(("s", replica), lambda: self.group.start(replica))

    def push(self, *replicas):
        """Push the gradients of replicas that have a token."""
        for replica in replicas:
            self.group.calls(
                ("a", replica), lambda r=replica: self.group.arrive(r)
            )

    def push_untold(self, replica):
        """Push as one that dies before it tells of it."""
        step = tf.constant(self.group.global_step(), tf.int64)
        grad = tf.one_hot(replica, self.group.quorum.replicas, dtype="float64")
        self.group._arrivals.push(grad, step)

    def tokens(self, *replicas):
        """Wait for a token of each; return their numbers."""
        return [self._token(replica) for replica in replicas]

    def _token(self, replica):
        found = []

        def wait():
            body = lambda: self.group.wait(replica)  # noqa: E731
            found.extend(map(int, self.group.calls(("w", replica), body)))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert found, f"no token for replica {replica}"
        return found[0] - self.first

    def returns(self, replica):
        """Come back; return how many gradients the replica had pushed."""
        pushed = self.group.pushed(replica)
        self.group.enter(replica)
        return pushed

    def settle(self):
        """Wait until what has been told is handled."""
        self.coordinator.settle(Event.ASKED)

    def counts(self):
        """Return the counts once what has been told is handled."""
        self.coordinator.settle(Event.FLUSH)
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
        free(found.name)
    assert not found.coordinator.is_alive()
    assert not found.errors


def test_quotas():
    assert Quorum(4, 3, False).quotas == [1, 1, 1, 1]
    assert Quorum(4, 4, False).quotas == [1, 1, 1, 1]
    assert Quorum(2, 5, False).quotas == [3, 2]


def test_replicas_that_have_left_are_not_waited_for():
    with played(3, 3) as game:
        game.push(0, 1)
        game.group.send(Event.LEFT, 2)
        assert game.tokens(0) == [1]
        assert game.updates == [2]
        assert game.tokens(1) == [1]
        game.group.send(Event.LEFT, 1)
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
        assert game.returns(1) == 2
        # Its gradient is there already: it waits for the next update.
        game.settle()
        assert not game.has_token(1)
        game.push(0)
        assert game.tokens(0, 1) == [2, 2]
        # Now it dies before it has pushed.
        assert game.returns(1) == 2
        assert game.tokens(1) == [2]
        game.push(0, 1)
        assert game.tokens(0) == [3]
        assert game.updates == [2, 2, 2]
        assert game.counts().used == (3, 3)


def test_a_gradient_of_which_a_replica_that_died_did_not_tell():
    with played(2, 2) as game:
        game.push_untold(1)
        assert game.returns(1) == 0
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
            game.group.send(Event.LOST, replicas - 1)
            game.push(0)
            game.settle()
            assert game.updates == []
            if replicas == 2:
                continue
            game.group.send(Event.LEFT, 1)
            assert game.tokens(0) == [1]
            game.push(0)
            assert game.tokens(0) == [2]
            # One that goes on is waited for again.
            game.start(2)
            game.push(2, 0)
            assert game.tokens(0, 2) == [3, 3]
            game.push(0)
            game.settle()
            assert game.updates == [1, 1, 2]


def test_a_thread_that_hangs_is_not_waited_for():
    game = Played(1, 1, limit_s=0.5)
    free = threading.Event()
    game.coordinator._apply = lambda count, tokens: free.wait(60) and []
    game.push(0)
    wait = functools.partial(game.coordinator.settle, Event.FLUSH)
    for waits in (wait, game.coordinator.end):
        with pytest.raises(TowerError, match="not applied within 0.5 s"):
            waits()
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
    game.coordinator.settle(Event.FLUSH)
    game.coordinator.end()
