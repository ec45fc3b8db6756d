"""Where a hook's state is, and what becomes of it in another job."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction.compression_hooks import all_reduce
from keras_towers.reduction.rank_sum import RankSum
from keras_towers.reduction.stateful_hooks import HookState, StatefulHook
from keras_towers.transport import SingleProcess
from tests.reduction.ranks import Owner, on_ranks


class Remembers(StatefulHook):
    """Adds up a rank's gradients, and the sums of all ranks."""

    def init(self, specs):
        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        return HookState(own={"mine": zeros}, common=tf.zeros([]))

    def sum(self, transport, tensors, state, key):
        sums = transport.all_reduce(tensors, key)
        mine = [a + b for a, b in zip(state.own["mine"], tensors, strict=True)]
        total = state.common + tf.cast(tf.reduce_sum(sums[0]), tf.float32)
        return sums, HookState(own={"mine": mine}, common=total)


def own_of(rank_sum, optimizer):
    return [
        [value.numpy().tolist() for value in state.own["mine"]]
        for state in rank_sum.states(optimizer)
    ]


def test_each_optimizer_has_a_state_for_each_list_of_weights():
    rank_sum = RankSum(SingleProcess(), Remembers())
    first, second, weight, other = (Owner() for _ in range(4))

    @tf.function
    def step(x):
        (result,) = rank_sum.sum(first, [weight], [tf.ones(2)])
        rank_sum.sum(first, [other], [tf.ones(2) * 10])
        rank_sum.sum(second, [weight], [tf.ones(2) * 100])
        return result

    # Traced again, it goes on with the same variables.
    for number in (1, 2):
        np.testing.assert_array_equal(step(tf.ones(number)), [1, 1])
    assert own_of(rank_sum, first) == [[[2, 2]], [[20, 20]]]
    assert own_of(rank_sum, second) == [[[200, 200]]]
    assert rank_sum.held_bytes == 3 * (2 + 1) * tf.float32.size


def saved_by(size):
    """What rank 0 saves of ranks with gradients of 1, 2, ... in bfloat16."""

    def train(transport):
        rank_sum, optimizer = RankSum(transport, Remembers()), Owner()
        gradient = tf.cast([transport.rank + 1], tf.bfloat16)
        rank_sum.sum(optimizer, [optimizer], [gradient])
        return rank_sum.save([Owner(), optimizer])

    return on_ranks(size, train)[0]


def resumed_by(size, saved, hook=Remembers):
    """What each of some ranks has, before its first step or after it."""

    def resume(transport):
        rank_sum, optimizer = RankSum(transport, hook()), Owner()
        zero = tf.cast([0], tf.bfloat16)
        found = []
        for trains_before in False, True:
            if trains_before:
                rank_sum.sum(optimizer, [optimizer], [zero + 5])
            rank_sum.restore([Owner(), optimizer], saved[transport.rank])
            rank_sum.sum(optimizer, [optimizer], [zero])
            (state,) = rank_sum.states(optimizer)
            found.append([float(state.own["mine"][0][0]), float(state.common)])
        return found

    return on_ranks(size, resume)[0]


def test_ranks_go_on_with_their_own_states():
    saved = saved_by(2)
    assert not saved[1].values
    assert resumed_by(2, saved) == [[[1, 3]] * 2, [[2, 3]] * 2]


def test_other_ranks_share_what_has_been_a_ranks_own():
    first, *others = saved_by(2)
    assert resumed_by(3, [first, *others * 2]) == [[[1, 3]] * 2] * 3
    assert resumed_by(1, [first]) == [[[3, 3]] * 2]


def test_the_state_of_another_hook_is_dropped(caplog):
    class Wider(Remembers):
        def init(self, specs):
            return HookState(own={"mine": [tf.zeros(7)]}, common=tf.zeros([]))

        def sum(self, transport, tensors, state, key):
            return list(tensors), state

    assert resumed_by(1, saved_by(1), Wider) == [[[0, 0]] * 2]
    assert "another communication hook" in caplog.text
    caplog.clear()
    (saved,) = saved_by(1)
    rank_sum, optimizer = RankSum(SingleProcess(), all_reduce), Owner()
    rank_sum.restore([Owner(), optimizer], saved)
    rank_sum.sum(optimizer, [optimizer], [tf.ones(1)])
    assert "another communication hook" in caplog.text


NO_STATE = r"sum of .*Wrong must return the sums and the next HookState, not \["
OTHER_STATE = "state of .*Wrong needs the struct"


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (None, NO_STATE),
        (HookState(), OTHER_STATE),
        (HookState({"mine": [tf.zeros(7)]}, tf.zeros([])), OTHER_STATE),
    ],
)
def test_another_state_than_that_of_init_is_refused(after, words):
    class Wrong(Remembers):
        def sum(self, transport, tensors, state, key):
            return [*tensors] if after is None else ([*tensors], after)

    rank_sum, optimizer = RankSum(SingleProcess(), Wrong()), Owner()
    with pytest.raises(TowerError, match=words):
        rank_sum.sum(optimizer, [optimizer], [tf.ones(1)])
