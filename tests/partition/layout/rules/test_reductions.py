"""How towers have sums, means, extremes and cumulative sums."""

import tensorflow as tf

from tests.partition.kit import replicated, sharded
from tests.partition.layout_list import as_listed

X, COLUMNS = sharded(-1, 4, 6), sharded(4, -1)
VIEWS = sharded(-1, 4, blocks=2)
TEXTS = WORDS = sharded(-1, 3, 4, hidden=(1,))
SINGLE = sharded(-1, 1, 4, hidden=(1,))


CUMULATIVE = {
    "Cumsum of rows": (tf.cumsum, X),
    "Cumsum of earlier rows": lambda x: tf.cumsum(x, exclusive=True),
    "Cumsum of later rows": lambda x: tf.cumsum(x, reverse=True),
    "Cumsum of views": (tf.cumsum, VIEWS),
    "Cumsum of columns": lambda columns: tf.cumsum(columns, 1),
    "Cumprod of rows": (tf.math.cumprod, X),
}


test_cumulative = as_listed("reductions: cumulative", CUMULATIVE)


def _moments(axes, keeps=False):
    return lambda x: tf.nn.moments(x, axes, keepdims=keeps)


MOMENTS = {
    "of rows": (_moments([0]), X),
    "of rows and more": (_moments([0, 2]), X),
    "that keep their axes": (_moments([0, 1], True), X),
    "of columns": (_moments([1]), COLUMNS),
    "of views": (_moments([0]), VIEWS),
}


test_mean_and_variance_share_their_exchange = as_listed(
    "reductions: moments", MOMENTS, exchanges=True
)


def _broadcast(x, w):
    return tf.gradients(tf.reduce_sum(tf.sin(x + w)), [x, w])


# Their axes may be known only when the step runs.
BROADCASTS = {
    "to words": (_broadcast, TEXTS, sharded(-1, 1, 4)),
    "to words of another number": (_broadcast, TEXTS, WORDS),
    "of a single word": (_broadcast, TEXTS, SINGLE),
    "to texts": (_broadcast, TEXTS, replicated(4)),
}


test_gradient_of_a_broadcast = as_listed("reductions: broadcasts", BROADCASTS)
