"""Replicas, played by a test, and their coordinator."""

import concurrent.futures
import contextlib
import itertools
import threading
from unittest import mock

import tensorflow as tf

from keras_towers.parameter_servers.remote_runtime import RunningFunction
from keras_towers.replicas.coordinator import Coordinator, EarlyCoordinator
from keras_towers.replicas.named_resources import free, run_flat, trace
from keras_towers.replicas.replica_counts import Quorum
from keras_towers.replicas.replica_group import END, ReplicaEvent, ReplicaGroup

DEVICE = "/device:CPU:0"
SECONDS = 60
_numbers = itertools.count()


class Game:
    """Replicas that have begun, and a coordinator that runs.

    Attributes:
        group: as the chief sees it.
    """

    def __init__(
        self,
        replicas,
        aggregate,
        shared=False,
        early=False,
        most=1000,
        limit_s=SECONDS,
    ):
        self.name = f"tests/replicas_{next(_numbers)}"
        self.quorum = Quorum(replicas, aggregate, shared)
        self._updates = []
        self.errors = []
        self._early = early
        self._groups = [self.connect(replica) for replica in range(replicas)]
        self.group = self._groups[0]
        self.group.initialize()
        self.group.calls("begin", self.group.start_over)
        self.first = self.group.global_step()
        assert self.wait(*range(replicas)) == [0] * replicas

        def update(count):
            arrived = self.group.take_arrivals(count)
            # An update of more gradients than ``most`` fails.
            fine = tf.debugging.assert_less_equal(
                tf.reduce_sum(arrived), tf.constant(most, tf.int64)
            )
            with tf.control_dependencies([fine]):
                advanced = self.group.advance()
            with tf.control_dependencies([advanced]):
                return tf.identity(arrived)

        self._update = trace(update, tf.TensorSpec((), tf.int32))
        kind = EarlyCoordinator if early else Coordinator
        # It waits in a separate thread.
        self.coordinator = kind(
            self.group.run_by(run_flat),
            self.apply,
            self.errors.append,
            limit_s,
        )
        self.coordinator.start()

    def connect(self, replica):
        """Return the group of a replica."""
        return ReplicaGroup(self.name, DEVICE, self.quorum, early=self._early)

    def apply(self, count):
        running = RunningFunction(self._update, [tf.constant(count)])
        if self._early:
            return running
        (averaged,) = running.wait()
        self._updates.append(int(sum(averaged)))
        return averaged

    def start(self, replica):
        """Begin to compute a gradient with the current weights."""
        group = self._groups[replica]
        group.calls("start", lambda: group.start_gradient(replica))

    def push(self, *replicas):
        """Push a gradient of each replica."""
        for replica in replicas:
            group = self._groups[replica]
            group.calls("arrive", lambda r=replica, g=group: g.arrive(r))

    def push_uncounted(self, replica):
        """Push a gradient of a replica that dies before it counts it."""
        step = tf.constant(self.group.global_step(), tf.int64)
        grad = tf.one_hot(replica, self.quorum.replicas, dtype="float64")
        self.group._arrivals.push(grad, step)

    def push_untold(self, replica):
        """Push a gradient of a replica that dies before it says so."""
        group = self._groups[replica]
        with mock.patch.object(group, "_put"):
            group.calls("untold", lambda: group.arrive(replica))

    def wait(self, *replicas):
        """Wait until each may go on; return the steps since the beginning.

        A replica that goes on without a step gets ``END``.
        """
        waiting = [self.begin_to_wait(replica) for replica in replicas]
        return [future.result(SECONDS) for future in waiting]

    def begin_to_wait(self, replica):
        """Let a replica wait in a thread; return its step, in a future."""
        group, future = self._groups[replica], concurrent.futures.Future()

        def wait():
            step = group.calls("wait", lambda: group.wait_for_step(replica))
            step = int(step[0])
            future.set_result(END if step == END else step - self.first)

        threading.Thread(target=wait, daemon=True).start()
        return future

    def returns(self, replica):
        """Restart a replica; return how many gradients it had pushed."""
        self._groups[replica] = group = self.connect(replica)
        return group.come_back(replica)

    def settle(self):
        """Wait until all events so far are handled."""
        self.coordinator.wait_until_handled(ReplicaEvent.SYNC)

    def updates(self):
        """Return the number of gradients in each update that is not early."""
        self.settle()
        return self._updates

    def counts(self):
        """Return the counts after all events so far, and the last update."""
        self.coordinator.wait_until_handled(ReplicaEvent.FLUSH)
        return self.coordinator.counts


@contextlib.contextmanager
def played(*args, **kwargs):
    game = Game(*args, **kwargs)
    try:
        yield game
    finally:
        game.coordinator.stop()
        free(game.name)
    assert not game.coordinator.is_alive()
    assert not game.errors
