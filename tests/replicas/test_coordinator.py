"""The coordinator: waits, tokens and counts."""

import functools
import threading
import time

import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.replicas.replica_counts import Quorum
from keras_towers.replicas.replica_group import END, ReplicaEvent
from tests.kit.leaving import Boom
from tests.replicas.game import SECONDS, Game, played

pytestmark = pytest.mark.alternate


def test_quotas():
    assert Quorum(4, 3, False).quotas == [1, 1, 1, 1]
    assert Quorum(4, 4, False).quotas == [1, 1, 1, 1]
    assert Quorum(2, 5, False).quotas == [3, 2]


def test_updates_do_not_wait_for_replicas_that_have_left():
    with played(3, 3) as game:
        game.push(0, 1)
        game.group.send(ReplicaEvent.LEFT, 2)
        assert game.wait(0) == [1]
        assert game.updates() == [2]
        assert game.wait(1) == [1]
        game.group.send(ReplicaEvent.LEFT, 1)
        game.push(0)
        assert game.wait(0) == [2]
        # The end releases replicas.
        game.group.send_end(0)
        assert game.wait(0) == [END]


@pytest.mark.parametrize("early", [False, True])
def test_a_restarted_replica_goes_on_after_its_last_gradient(early):
    with played(2, 2, early=early) as game:
        game.push(0, 1)
        # It dies before it has read its weights, and then before it has pushed.
        assert game.wait(0) == [1]
        for _ in range(2):
            assert game.returns(1) == 1
            assert game.wait(1) == [1]
        game.push(1)
        # Its gradient has arrived: it waits for the next update.
        assert game.returns(1) == 2
        waiting = game.begin_to_wait(1)
        time.sleep(0.2)
        assert not waiting.done()
        game.push(0)
        assert game.wait(0) == [2]
        assert waiting.result(SECONDS) == 2
        game.push(0, 1)
        assert game.wait(0, 1) == [3, 3]
        assert game.counts().used == (3, 3)


def test_a_gradient_of_a_replica_that_died_before_its_arrival():
    with played(2, 2) as game:
        game.push_uncounted(1)
        assert game.returns(1) == 0
        assert game.wait(1) == [0]
        game.push(1, 0)
        assert game.wait(0, 1) == [1, 1]
        game.push(0, 1)
        # The gradient is counted; updates do not wait for its arrival.
        assert game.wait(0, 1) == [2, 2]
        assert game.updates() == [3, 2]


def test_a_gradient_of_a_replica_that_died_before_it_said_so():
    with played(2, 3) as game:
        game.push(0, 1)
        game.push_untold(0)
        assert game.updates() == []
        assert game.returns(0) == 2
        assert game.wait(0, 1) == [1, 1]
        game.push(0, 0)
        game.push_untold(1)
        # The update waits for no other gradient of it, though it ends instead.
        game.group.send(ReplicaEvent.LEFT, 1)
        assert game.wait(0) == [2]
        assert game.counts().used == (4, 2)
        assert game.updates() == [3, 3]
    # Others may have used it, or gone on without it.
    with played(3, 2) as game:
        game.push_untold(0)
        game.push(1, 2)
        assert game.wait(1, 2) == [1, 1]
        assert game.returns(0) == 1
        assert game.wait(0) == [1]
        game.push(1, 2)
        assert game.wait(1, 2) == [2, 2]
        game.push_untold(0)
        assert game.returns(0) == 2
        counts = game.counts()
        assert counts.used == (1, 2, 2)
        assert counts.dropped == (1, 0, 0)


def test_a_replica_may_take_several_shared_tokens_of_an_update():
    with played(2, 3, shared=True) as game:
        game.push(0)
        assert game.wait(0) == [0]
        game.push(0)
        # Its first gradient needs no token, also after a restart.
        assert game.returns(1) == 0
        assert game.wait(1) == [0]
        game.push(1)
        assert game.wait(0, 1) == [1, 1]
        assert game.counts().used == (2, 1)


def test_updates_wait_for_a_lost_replica_unless_it_can_be_spared():
    for replicas in (2, 3):
        with played(replicas, 2) as game:
            game.group.send(ReplicaEvent.LOST, replicas - 1)
            game.push(0)
            assert game.updates() == []
            if replicas == 2:
                continue
            game.group.send(ReplicaEvent.LEFT, 1)
            assert game.wait(0) == [1]
            game.push(0)
            assert game.wait(0) == [2]
            # Updates wait for it again once it goes on.
            game.start(2)
            game.push(2, 0)
            assert game.wait(0, 2) == [3, 3]
            game.push(0)
            assert game.updates() == [1, 1, 2]


def test_the_wait_for_a_hanging_update_is_limited():
    game = Game(1, 1, limit_s=0.5)
    free = threading.Event()
    game.coordinator._apply = lambda count: free.wait(60) and []
    game.push(0)
    wait = functools.partial(
        game.coordinator.wait_until_handled, ReplicaEvent.FLUSH
    )
    for waits in (wait, game.coordinator.stop):
        with pytest.raises(TowerError, match="not applied within 0.5 s"):
            waits()
    free.set()
    game.coordinator.join(SECONDS)
    assert not game.coordinator.is_alive()


def test_an_error_ends_the_coordinator():
    def fail(count):
        raise Boom

    game = Game(1, 1)
    game.coordinator._apply = fail
    game.push(0)
    game.coordinator.join(SECONDS)
    assert not game.coordinator.is_alive()
    (error,) = game.errors
    assert isinstance(error, Boom)
    # Later waits return at once.
    game.coordinator.wait_until_handled(ReplicaEvent.FLUSH)
    game.coordinator.stop()


def test_an_early_update_waits_for_all_replicas_that_have_not_left():
    with played(3, 3, early=True) as game:
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
    with played(2, 2, early=True) as game:
        game.push(0, 1)
        assert game.wait(0, 1) == [1, 1]
        game.push(1)
        game.group.send(ReplicaEvent.STOPPED, 0)
        assert game.wait(1) == [END]
        game.settle()
        assert game.group.global_step() == game.first + 1


def test_the_error_of_an_early_update_is_raised():
    with played(1, 1, early=True, most=0) as game:
        game.push(0)
        game.settle()
        until = time.monotonic() + SECONDS
        while not game.coordinator._running.has_failed:
            assert time.monotonic() < until
        with pytest.raises(tf.errors.InvalidArgumentError):
            game.coordinator.check_failed()
