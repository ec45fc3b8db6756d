"""Steps whose rows follow from the data, with gradients, against one device."""

import dataclasses

import pytest
import tensorflow as tf

from tests.kit.sampling import sample_of
from tests.partition import kit

TOWERS = ((5, 2), (2, 0, 3), (0, 1, 0), (1, 1, 4))
_GIVEN = (
    kit.sharded(-1, 4, 3),
    kit.sharded(-1, 3),
    kit.sharded(-1, dtype="int32", low=0, high=2),
)


def _size(t, dtype=tf.int32):
    return tf.shape(t, dtype)[0]


def _masked_loss(x, y, c):
    """A language model learns masked words."""
    mask = tf.abs(x[:, :, 0]) > 0.4
    labels = tf.boolean_mask(tf.cast(x[:, :, 1] > 0, tf.int32), mask)
    logits = tf.boolean_mask(x, mask)
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )
    right = tf.argmax(logits, 1, tf.int32) == labels
    return loss, tf.reduce_mean(tf.cast(right, tf.float32))


def _masks_of_masks(x, y, c):
    mask = c > 0
    some = tf.boolean_mask(y, mask)
    fewer = some[:, 0] > 0
    left = tf.boolean_mask(some, fewer)
    places = tf.boolean_mask(tf.where(mask)[:, 0], fewer)
    back = tf.math.unsorted_segment_sum(left, places, _size(y, tf.int64))
    among = tf.math.unsorted_segment_sum(
        left, tf.where(fewer)[:, 0], _size(some, tf.int64)
    )
    return back * y, among, places, tf.reduce_mean(among)


def _best_two(x, y, c):
    _, best = tf.math.top_k(y, 2)
    number = tf.range(_size(y))[:, None]
    return tf.gather(tf.reshape(y, [-1]), number * 3 + best) * [1.0, 2.0]


def _parts_of_pairs(x, y, c):
    parts = tf.stack([c, 1 - c % 2], 1)
    found = tf.dynamic_partition(x[:, :2], parts, 3)
    return *found, tf.reduce_mean(found[1] ** 2)


def _statistics(x, y, c):
    some = tf.boolean_mask(x, c > 0)
    return (
        tf.reduce_mean(some, [0, 1]),
        tf.reduce_max(some),
        tf.reduce_prod(some, 0),
        tf.math.count_nonzero(some),
        tf.reduce_any(some > 0),
        tf.linalg.norm(some),
        tf.nn.l2_normalize(some, 0),
        tf.reduce_logsumexp(some),
    )


_STEPS = {
    "masked": kit.with_gradients(_masked_loss),
    "masks of masks": kit.with_gradients(_masks_of_masks),
    "best two": kit.with_gradients(_best_two),
    "parts of pairs": kit.with_gradients(_parts_of_pairs),
    "statistics": _statistics,
}


@pytest.mark.parametrize("name", sample_of(_STEPS, 4))
def test_steps_by_the_data(name):
    kit.check_divided(_STEPS[name], *_GIVEN, towers=TOWERS)


def test_a_masked_mean_exchanges_sums_only():
    def step(x, y, c):
        loss = tf.reduce_mean(tf.boolean_mask(y, c > 0) ** 2)
        (gradient,) = tf.gradients(loss, y)
        return loss, tf.reduce_sum(gradient, 0)

    program = kit.check_on_towers(step, *_GIVEN, towers=TOWERS)
    assert kit.exchange_counts(program) == {"sum": 3}
    assert not kit.computed_once(program)


@dataclasses.dataclass(frozen=True)
class _OfSix(kit.Input):
    """Rows of a batch of which the trace knows the number of examples."""

    @property
    def spec(self):
        sizes = [6 if size == -1 else size for size in self.shape]
        return tf.TensorSpec(sizes, self.dtype)


@pytest.mark.parametrize("name", sample_of(_STEPS, 4))
def test_batches_of_a_known_size(name):
    given = [_OfSix(g.layout, g.shape, g.dtype, g.low, g.high) for g in _GIVEN]
    towers = (3, 3), (5, 1), (0, 6), (2, 0, 4)
    kit.check_divided(_STEPS[name], *given, towers=towers)


def test_a_band_has_as_many_diagonals_as_there_are_examples():
    given = _OfSix(kit.sharded(-1, 7).layout, (-1, 7))
    kit.check_on_towers(
        lambda x: tf.linalg.diag(x, k=(0, 5)), given, towers=((3, 3),)
    )
