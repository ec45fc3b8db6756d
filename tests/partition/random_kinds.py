"""What the operations of random programs have in common.

Each is a function that takes an ``Operation``, in a list of its kind.
"""

import tensorflow as tf

SEGMENTS = 5


def add_to(kind):
    """Note an operation in the list of its kind."""

    def register(function):
        kind.append(function)
        return function

    return register


def name_of(function):
    return function.__name__.strip("_")


def are_alike(a, b):
    return a.shape.as_list() == b.shape.as_list()


def size_of(x):
    return tf.shape(x)[0]


def bounded(x):
    """Without what extremes of nothing are."""
    return tf.clip_by_value(x, -2.0, 2.0)
