"""Exchanges of a graph that take turns with their memory."""

import collections
import threading
import time

import tensorflow as tf

from keras_towers.transport.memory_turns import Turns


class Memories:
    """Notes which memories exchanges use, and which several use at once."""

    def __init__(self):
        self.used, self.shared = collections.Counter(), set()
        self._now, self._lock = collections.Counter(), threading.Lock()

    def exchange(self, value):
        """An exchange of this value, which takes a while."""

        def begin(value, name):
            name = str(name)
            with self._lock:
                self.used[name] += 1
                self._now[name] += 1
                if self._now[name] > 1:
                    self.shared.add(name)
            time.sleep(0.02)
            return value

        def end(value, name):
            with self._lock:
                self._now[str(name)] -= 1
            return value

        def add(name):
            result = value
            for act in (begin, end):
                result = tf.numpy_function(act, [result, name], tf.float32)
            return [result]

        return add


def test_exchanges_of_a_graph_share_memory_one_after_another():
    memories, turns = Memories(), Turns(2)

    def step(x):
        for k in range(6):
            kind = "ab"[k % 2]
            turns.take(memories.exchange(x + k), kind)
        return x

    for _ in range(2):
        # Traced twice: outermost functions share memory.
        tf.function(step, autograph=False)(tf.ones([]))
    assert not memories.shared
    # Two for each of two kinds.
    assert sorted(memories.used.values()) == [2, 2, 4, 4]


def test_functions_in_a_graph_have_memory_of_their_own():
    memories, turns = Memories(), Turns(1)

    def inner(x):
        return turns.take(memories.exchange(x))[0]

    @tf.function(autograph=False)
    def step(x):
        turns.take(memories.exchange(x))
        for _ in range(2):
            x += tf.function(inner, autograph=False)(x)
        return x

    assert step(tf.ones([])) == 4
    assert sorted(memories.used.values()) == [1, 1, 1]
    turns.take(memories.exchange(tf.ones([])))
    assert len(memories.used) == 4
