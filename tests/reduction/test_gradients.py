import pytest
import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.reduction.gradients import check_towers, split_kinds
from tests.reduction.cases import cpus, make_gradients

pytestmark = pytest.mark.core


def slices(width, rows=2, dtype=tf.float32):
    return tf.IndexedSlices(
        tf.ones([rows, width], dtype), tf.zeros([rows], tf.int64)
    )


def test_kinds_are_told_apart():
    assert split_kinds([tf.ones([]), slices(1), tf.ones([2])]) == ([0, 2], [1])


def test_equal_towers_pass():
    check_towers(make_gradients(3), cpus(3))


def test_slices_may_differ_in_number():
    check_towers([[slices(3, rows=1)], [slices(3, rows=5)]], cpus(2))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([tf.ones([2])], "Tower 1 has 1 gradients, but tower 0 has 2"),
        (
            [tf.ones([2]), tf.ones([2])],
            "Gradient 1 is a tf.Tensor on tower 1, but a IndexedSlices",
        ),
        (
            [tf.ones([2]), slices(4)],
            r"Gradient 1 is shape \(None, 4\) on tower 1, but .*\(None, 3\)",
        ),
        (
            [tf.ones([3]), slices(3)],
            r"Gradient 0 is shape \(3,\) on tower 1, but shape \(2,\)",
        ),
        (
            [tf.ones([2], tf.float16), slices(3)],
            "Gradient 0 is float16 on tower 1, but float32",
        ),
        (
            [tf.ones([2]), slices(3, dtype=tf.float64)],
            "Gradient 1 is float64 on tower 1, but float32",
        ),
        ([tf.ones([2]), None], "Gradient 1 of tower 1 is None"),
    ],
)
def test_what_differs_is_named(second, message):
    with pytest.raises(TowerError, match=message):
        check_towers([[tf.ones([2]), slices(3)], second], cpus(2))


def test_lists_have_to_match_devices():
    with pytest.raises(TowerError, match="of 2 towers for 3 devices"):
        check_towers([[], []], cpus(3))
    with pytest.raises(TowerError, match="at least one"):
        check_towers([], [])
