"""Steps of ranks are in order and agree; in some tests ranks are threads."""

import zlib

import pytest
import tensorflow as tf

from keras_towers.fit.data.batches import TowerBatch
from keras_towers.fit.ranks import step_agreement
from keras_towers.fit.ranks.compared_step import (
    ComparedStep,
    Constants,
    ConstantText,
    Operations,
    OperationText,
)
from keras_towers.fit.ranks.step_agreement import StepAgreement
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.transport import SingleProcess
from tests.reduction.ranks import on_ranks

pytestmark = pytest.mark.alternate


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
        with order.in_order():
            order.reduce(["w"], [list(batch.pieces)], lambda rows: rows)
        return order.end_step(batch.pieces)

    step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    assert transport.begun.numpy() == 1


class Rank0(SingleProcess):
    """A transport to rank 0, whose variables are the same, or are 7."""

    size = 2

    def __init__(self, same):
        self.same = same
        self.sent = tf.Variable(0)

    def all_reduce(self, tensors, key):
        return [2 * t if self.same else 2 * t + 1 for t in tensors]

    def broadcast(self, tensors, key, root=0):
        self.sent.assign_add(1)
        return [tf.fill(tf.shape(t), tf.cast(7, t.dtype)) for t in tensors]


@pytest.mark.core
@pytest.mark.parametrize("same", [True, False])
def test_variables_are_sent_once_an_epoch_if_they_differ(same):
    rank_0 = Rank0(same)
    order = StepOrder(rank_0)
    numbers = tf.Variable([1, 2]), tf.Variable(True)
    copies = tf.Variable([0.5] * 3), tf.Variable([0.5] * 3)
    handles = [[v.handle] for v in numbers] + [[c.handle for c in copies]]

    def take_over():
        return order.agreement.take_over(handles, ["CPU:0"] * 2)

    @tf.function
    def step():
        order.in_first_step(take_over)
        return order.end_step(tf.zeros(()))

    before = [variable.numpy().tolist() for variable in (*numbers, *copies)]
    after = before if same else [[7, 7], True, [7.0] * 3, [7.0] * 3]
    for epoch in 1, 2:
        order.begin_epoch()
        step()
        step()
        assert rank_0.sent.numpy() == (0 if same else epoch)
        now = [variable.numpy().tolist() for variable in (*numbers, *copies)]
        assert now == after


def are_alike(numbers, about=None):
    """What ranks find, each of which has a number and knows another nearly."""
    about = about or [0] * len(numbers)

    def run(transport):
        number, near = (
            tf.constant([of_ranks[transport.rank]], tf.int64)
            for of_ranks in (numbers, about)
        )
        equal = step_agreement.are_equal(transport, number, near, "k")
        return bool(tf.reduce_all(tf.concat(equal, 0)))

    results, _ = on_ranks(len(numbers), run)
    (found,) = set(results)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("number", [0, 1, 2**16, 2**32 - 1])
def test_one_sum_tells_whether_all_ranks_have_the_same_number(ranks, number):
    numbers = [number] * ranks
    assert are_alike(numbers)
    for other in (number ^ 1, number ^ 2**16, number ^ (2**32 - 1)):
        assert not are_alike([*numbers[:-1], other])
        assert not are_alike([other, *numbers[1:]])
    # Two other numbers may have the first one as their mean.
    assert not are_alike([number, number ^ 3, number ^ 5])


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("number", [0, -1, 2**20, 2**40])
def test_numbers_may_be_about_the_same(ranks, number):
    numbers = [7] * ranks
    near = [number + rank % 2 for rank in range(ranks)]
    assert are_alike(numbers, near)
    for far in (number + ranks + 1, number - ranks):
        assert not are_alike(numbers, [*near[:-1], far])


@pytest.mark.parametrize("ends", [(3, 3), (3, 4), (3, None)])
def test_data_ends_on_all_ranks_or_on_none(ends):
    """Where it goes on there is another step, which fails."""

    def run(transport):
        agreement = StepAgreement(transport)
        batches = ends[transport.rank]
        if batches is not None:
            same = bool(agreement.all_end(batches, []))
        else:
            equal = agreement._compare([7, 0, 0, 0], [0, 0, 0])
            same = bool(tf.reduce_all(equal.exact))
        return same or str(agreement.mismatch_error(batches))

    (one, other), _ = on_ranks(2, run)
    assert one == other
    if ends == (3, 3):
        assert one is True
    else:
        assert f"(rank 0: 3, rank 1: {ends[1] or 'more'})" in one


def listed(*names):
    """The operations of a step, by their names."""
    checksums = [zlib.crc32(name.encode()) for name in names]
    texts = [OperationText(n, {"padding": n[-1]}, "mine.py:1") for n in names]
    return Operations.of(sum(checksums) % 2**32, checksums, texts)


def _step(exchanged, constants=("1",), operations=("a",)):
    """Each constant is used at a place, which other constants may have, too."""
    digest = zlib.crc32(" ".join(constants).encode())
    described = [
        ConstantText(place, zlib.crc32(text.encode()), (0, 0, 0), text)
        for place, text in enumerate(constants, len(operations[0]))
    ]
    return ComparedStep(
        exchanged,
        listed(*operations),
        Constants(digest, described=described),
    )


STEP = _step(["sum a"])


@pytest.mark.parametrize(
    "other, said, unsaid",
    [
        (
            _step(["sum a_1"], ["2"]),
            ["different constants"],
            "different steps",
        ),
        (
            _step(["sum a"], ["1"] * 2),
            ["constants", "1: 1"],
            "different steps",
        ),
        (_step(["sum a", "w"]), ["different steps", "1: w"], "constants"),
        (_step(["sum a"] * 2), ["0: none", "1: sum a"], "constants"),
        (
            _step(["w"], ["2"]),
            ["0: sum a; only on rank 1: w", "different constants"],
            "none",
        ),
        (
            _step(["w"], ["2"], ["bb"]),
            ["differs: rank 0: a of mine.py:1; rank 1: bb of mine"],
            "constants",
        ),
        (
            _step(["w"], ["2"], ["b"]),
            ["different constants", "0: 1; only on rank 1: 2."],
            "mine.py",
        ),
        (
            _step(["sum a"], operations=["a", "a"]),
            ["rank 0: none; rank 1: a of"],
            "padding",
        ),
    ],
    ids=[
        *("constants", "one-more-constant", "exchanges", "one-more", "both"),
        *("operations", "of-another-constant", "one-more-operation"),
    ],
)
def test_a_difference_is_told_for_what_it_is(other, said, unsaid):
    """By what ranks have traced last, if others have had that, too."""
    before = _step(["sum a"], ["3"], ["of both"])

    def run(transport):
        agreement = StepAgreement(transport)
        mine = other if transport.rank else STEP
        for step in before, mine:
            exact, approximate = step.numbers
            agreement._traced[(*exact, *approximate)] = step
        return str(agreement.mismatch_error())

    (text, same), _ = on_ranks(2, run)
    assert same == text
    assert all(words in text for words in said), text
    assert unsaid not in text
    assert not STEP.is_like(*other.numbers)
    assert STEP.is_like(*STEP.numbers)
