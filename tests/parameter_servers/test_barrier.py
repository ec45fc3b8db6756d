"""A barrier of workers, one of which dies, comes back and leaves."""

import threading

from keras_towers.parameter_servers.barrier import Barrier
from keras_towers.replicas.resources import Functions

DEVICE = "/device:CPU:0"


class Worker:
    """A worker, played by the test."""

    def __init__(self, rank):
        self._barrier = Barrier("tests/barrier", DEVICE, rank, 2)
        self._calls = Functions()

    def does(self, *names):
        for name in names:
            found = self._calls(name, getattr(self, f"_{name}"))
        return found

    def _begin(self):
        return self._barrier.begin()

    def _enter(self):
        return self._barrier.enter()

    def _arrive(self):
        self._barrier.arrive()

    def _wait(self):
        return self._barrier.wait_for_all()

    def _leave(self):
        return self._barrier.leave()

    def _tell_first(self):
        self._barrier.publish_part(0)

    def _wait_for_first(self):
        return self._barrier.wait_for_end_of_step(0)


def test_nobody_goes_on_before_all_have_come():
    one, other = Worker(0), Worker(1)
    one.does("begin")
    for name in ("enter", "arrive", "wait"):
        for worker in (one, other):
            worker.does(name)
    one.does("arrive")
    goes_on = threading.Thread(target=one.does, args=("wait",), daemon=True)
    goes_on.start()
    goes_on.join(0.3)
    assert goes_on.is_alive()
    other.does("arrive")
    goes_on.join(60)
    assert not goes_on.is_alive()


def test_a_part_is_waited_for_before_the_whole():
    one, other = Worker(0), Worker(1)
    one.does("begin")
    for name in ("enter", "arrive", "wait", "tell_first"):
        for worker in (one, other):
            worker.does(name)
    # Nobody has come to the end of the step, and it is told as often as one
    # likes.
    one.does("tell_first", "wait_for_first", "arrive")
    other.does("wait_for_first", "arrive", "wait")
    one.does("wait")
    # Of one that has left no part is waited for.
    other.does("leave")
    one.does("arrive", "wait", "tell_first", "wait_for_first")


def test_a_worker_that_comes_back_has_come_as_often_as_before():
    one, other = Worker(0), Worker(1)
    one.does("begin")
    assert one.does("enter") == other.does("enter") == [0]
    for worker in (one, other):
        worker.does("arrive")
    for worker in (one, other):
        worker.does("wait")
    one.does("arrive")
    # It has taken the note of the first time, but nobody's of the second.
    again = Worker(1)
    assert again.does("enter") == [1]
    again.does("arrive", "wait")
    one.does("wait")
    again.does("leave")
    one.does("arrive", "wait", "arrive", "wait")
