"""Agreement of ranks in each step, with the test as the other ranks."""

import pytest
import tensorflow as tf

from keras_towers.fit.data.batches import TowerBatch
from keras_towers.fit.update.step_order import StepOrder
from keras_towers.transport import SingleProcess


class Played(SingleProcess):
    """Sums what this rank says once for each rank, which has two numbers."""

    def __init__(self, numbers, about=None):
        self.size = len(numbers)
        self._numbers = [tf.constant(number, tf.int64) for number in numbers]
        self._about = about or [0] * self.size
        self._said = []
        self._others = None

    def are_alike(self):
        order = StepOrder(self)
        for number, about in zip(
            self._numbers[1:], self._about[1:], strict=True
        ):
            order.are_equal(number, tf.constant([about], tf.int64))
        said, self._said = self._said, []
        self._others = tf.add_n(said)
        about = tf.constant(self._about[:1], tf.int64)
        return bool(tf.reduce_all(order.are_equal(self._numbers[0], about)))

    def all_reduce(self, tensors, key):
        (mine,) = tensors
        if self._others is not None:
            return [mine + self._others]
        self._said.append(mine)
        return [mine]


@pytest.mark.parametrize("ranks", [2, 3, 64])
@pytest.mark.parametrize("number", [0, 1, 2**16, 2**32 - 1])
def test_one_sum_tells_whether_all_ranks_have_the_same_number(ranks, number):
    numbers = [number] * ranks
    assert Played(numbers).are_alike()
    for other in (number ^ 1, number ^ 2**16, number ^ (2**32 - 1)):
        assert not Played([*numbers[:-1], other]).are_alike()
        assert not Played([other, *numbers[1:]]).are_alike()
    # Two other numbers may have the first one as their mean.
    assert not Played([number, number ^ 3, number ^ 5]).are_alike()


@pytest.mark.parametrize("ranks", [2, 3, 64])
@pytest.mark.parametrize("number", [0, -1, 2**20, 2**40])
def test_numbers_may_be_about_the_same(ranks, number):
    numbers = [7] * ranks
    near = [number + rank % 2 for rank in range(ranks)]
    assert Played(numbers, near).are_alike()
    for far in (number + 3 * ranks, number - 3 * ranks):
        assert not Played(numbers, [*near[:-1], far]).are_alike()


class Counting(SingleProcess):
    """Counts the exchanges with another rank, which says the same."""

    size = 2

    def __init__(self):
        self.begun = tf.Variable(0)

    def all_reduce(self, tensors, key):
        with tf.control_dependencies(tensors):
            self.begun.assign_add(1)
        return [2 * tensor for tensor in tensors]


def test_no_exchange_begins_without_a_batch():
    """The end of data would cancel it, and the other ranks would hang."""
    transport, data = Counting(), iter(tf.data.Dataset.from_tensors(1.0))
    order = StepOrder(transport)

    @tf.function
    def step():
        batch = order.begin_step(TowerBatch((next(data),)))
        with order.in_turn():
            order.reduce(["w"], [list(batch.pieces)], lambda rows: rows)
        return order.end_step(batch.pieces)

    step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    assert transport.begun.numpy() == 1


class Told(SingleProcess):
    """Gathers what this rank and another one tell."""

    size = 2

    def __init__(self, other):
        self.other = other

    def gather_objects(self, value):
        return [value, (value[0], self.other)]


@pytest.mark.parametrize(
    "step, constant, said, unsaid",
    [
        (["sum a_1"], "2", ["different constants"], "different steps"),
        (["sum a", "w"], "1", ["different steps", "1: w"], "constants"),
        (["sum a"] * 2, "1", ["0: none", "1: sum a"], "constants"),
        (
            ["w"],
            "2",
            ["0: sum a; only on rank 1: w", "different constants"],
            "none",
        ),
    ],
    ids=["constants", "steps", "one-more", "both"],
)
def test_a_difference_is_told_for_what_it_is(step, constant, said, unsaid):
    order = StepOrder(Told(([step], [constant])))
    order._traced[1] = ["sum a"]
    order._constants["1"] = None
    text = str(order.mismatch_error())
    assert all(words in text for words in said), text
    assert unsaid not in text
