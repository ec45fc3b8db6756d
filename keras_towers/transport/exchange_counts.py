"""Counts the exchanges of a process for the watch over its ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_towers import compat
from keras_towers.rendezvous import activity

Collective = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


def counted(
    name: str, collective: Collective, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Run a collective, which counts as an exchange while it runs.

    In a graph it begins once this rank has computed all that it sends: so a
    rank that computes for long does not wait.

    Args:
        name: of the exchange, the same on all ranks.
        collective: the collective.
        tensors: what this rank sends.
    """
    if tf.executing_eagerly():
        with activity.exchanges.running(name):
            return collective(tensors)
    begun, ended = _counts(name)
    with tf.control_dependencies(tensors), tf.device(compat.HOST):
        number = begun.assign_add(1)
    # Not after the count: what is computed first is sent first.
    results = collective(tensors)
    with tf.control_dependencies(results), tf.device(compat.HOST):
        # Not one more: a step that was cancelled may have ended none.
        ended.assign(number, read_value=False)
    return results


@functools.cache
def _counts(name: str) -> tuple[tf.Variable, tf.Variable]:
    """How many exchanges of a name have begun in graphs, and have ended."""
    begun, ended = (compat.hidden_variable(0, tf.int64) for _ in range(2))
    activity.exchanges.add(name, functools.partial(_read, begun, ended))
    return begun, ended


def _read(begun: tf.Variable, ended: tf.Variable) -> tuple[int, int]:
    # Also while another thread traces; the end first, lest it seem to run.
    with tf.init_scope():
        last = int(ended.numpy())
        return int(begun.numpy()), last
