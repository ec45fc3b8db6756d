"""Steps of ranks are in order and agree; in some tests ranks are threads."""

import pytest
import tensorflow as tf

from keras_towers.fit.data.batches import TowerBatch
from keras_towers.fit.data.same_data import first_far
from keras_towers.fit.ranks import step_agreement
from keras_towers.fit.ranks.compared_step import (
    ComparedStep,
    Line,
    ProgramText,
    line_of_exchange,
)
from keras_towers.fit.ranks.step_agreement import StepAgreement
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.foundation.errors import TowerError
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


def are_alike(numbers):
    """What ranks find, each of which has a number."""

    def run(transport):
        number = tf.constant([numbers[transport.rank]], tf.int64)
        equal = step_agreement.are_equal(transport, number, "k")
        return bool(tf.reduce_all(equal))

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


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_first_rank_is_found_whose_numbers_are_far(ranks):
    def run(transport):
        odd = [0.0, 1e-9, 1.0][transport.rank]
        values = tf.constant([2.0 + odd, float("nan")], tf.float64)
        return int(first_far(transport, values, values * 1e-6, "k"))

    results, _ = on_ranks(ranks, run)
    assert results == [0 if ranks == 2 else 2] * ranks


@pytest.mark.parametrize("ends", [(3, 3), (3, 4), (3, None)])
def test_data_ends_on_all_ranks_or_on_none(ends):
    """Where it goes on there is another step, which fails."""

    def run(transport):
        agreement = StepAgreement(transport)
        batches = ends[transport.rank]
        if batches is not None:
            same = bool(agreement.all_end(batches))
        else:
            with pytest.raises(TowerError) as found:
                agreement.assert_same(_step(["sum a"]), (), "k")
            return str(found.value)
        return same or str(agreement.mismatch_error(batches))

    (one, other), _ = on_ranks(2, run)
    assert one == other
    if ends == (3, 3):
        assert one is True
    else:
        assert f"(rank 0: 3, rank 1: {ends[1] or 'more'})" in one


def _step(exchanged, operations=("Add", "constant 1")):
    lines = [(n.encode(), Line(n, {}, "mine.py:1")) for n in operations]
    lines += map(line_of_exchange, exchanged)
    return ComparedStep(ProgramText.of(lines))


STEP = _step(["sum a"])


@pytest.mark.parametrize(
    "other, said, unsaid",
    [
        (
            _step(["sum a_1"], ["Add", "constant 2"]),
            [
                "rank 0: constant 1 of mine.py:1; rank 1: constant 2 of",
                "set_ra",
            ],
            "summaries",
        ),
        (_step(["sum a", "w"]), ["rank 0: none; rank 1: w."], "mine.py"),
        (_step(["w"]), ["rank 0: sum a; rank 1: w"], "none"),
        (
            _step(["w"], ["Sub", "constant 2"]),
            ["rank 0: Add of mine.py:1; rank 1: Sub of mine.py:1", "summaries"],
            "constant",
        ),
        (
            _step(["sum a"], ["Add"]),
            ["rank 0: constant 1 of mine.py:1; rank 1: sum a. "],
            "none",
        ),
    ],
    ids=["constants", "one-more", "exchanges", "operations", "fewer"],
)
def test_a_difference_is_told_for_what_it_is(other, said, unsaid):
    """By what ranks have traced last, if others have had that, too."""
    before = _step(["sum a"], ["of both"])

    def run(transport):
        agreement = StepAgreement(transport)
        mine = other if transport.rank else STEP
        for step in before, mine:
            agreement._traced[step.numbers] = step
        return str(agreement.mismatch_error())

    (text, same), _ = on_ranks(2, run)
    assert same == text
    assert all(words in text for words in said), text
    assert unsaid not in text
    assert STEP.numbers != other.numbers


def test_the_step_that_fails_is_told_whatever_others_had_before():
    """As after a step that was refused, which is no cause of this one."""
    earlier = _step(["sum b"], ["Mul"]), _step(["sum b"], ["Div"])
    now = STEP, _step(["w"], ["Sub"])

    def run(transport):
        agreement = StepAgreement(transport)
        for step in STEP, earlier[transport.rank], now[transport.rank]:
            agreement._traced[step.numbers] = step
        failed = f"{now[transport.rank].numbers}"
        return str(agreement.mismatch_error(said=failed))

    (text, same), _ = on_ranks(2, run)
    assert same == text
    assert "rank 0: Add of mine.py:1; rank 1: Sub of mine.py:1" in text
