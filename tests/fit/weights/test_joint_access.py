"""Ranks, here threads, read and write what each has rows of."""

import functools
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.weights import joint_access
from keras_towers.fit.weights.joint_access import JointAccess, KnownVariables
from keras_towers.fit.weights.shards import ShardedVariable, part_of
from keras_towers.foundation.errors import TowerError
from keras_towers.jobs.rendezvous.liveness import TaskState
from keras_towers.partition.ir.layouts import InShards, MeshLayout
from tests.reduction.ranks import on_ranks

WHOLES = {
    "first": np.arange(12, dtype="float32").reshape(4, 3),
    "second": np.arange(15, dtype="float32").reshape(5, 3) - 7,
}


class Rank:
    """A rank with two variables, which it may have met in another order."""

    def __init__(self, transport):
        self.rank = transport.rank
        self.access = JointAccess(transport, KnownVariables())
        names = [*WHOLES] if self.rank % 2 else [*reversed(WHOLES)]
        self.variables = {name: self.divided(name) for name in names}

    def divided(self, name):
        whole = tf.Variable(WHOLES[name])
        part = functools.partial(part_of, whole.read_value())
        rows = MeshLayout(towers=InShards(0, whole.shape[0]))
        return ShardedVariable(
            whole, part, rows, [["/device:CPU:0"]], "", self.access, name, name
        )

    def held(self):
        """What this rank has of the first variable."""
        ((shard,),) = self.variables["first"].shards
        return shard.numpy()


def of_ranks(function, size=2):
    """What a function of a ``Rank`` returns on each."""
    results, _ = on_ranks(size, lambda transport: function(Rank(transport)))
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_all_read(size):
    def read(rank):
        assert rank.held().size < WHOLES["first"].size
        return [rank.variables[name].numpy() for name in WHOLES]

    for values in of_ranks(read, size):
        for value, whole in zip(values, WHOLES.values(), strict=True):
            np.testing.assert_array_equal(value, whole)


def test_others_serve_one_that_reads_and_writes():
    def work(rank):
        if rank.rank == 1:
            kernel = rank.variables["second"]
            kernel.assign(kernel.numpy() * 2)
            rank.variables["first"].assign_add(tf.ones([4, 3]))
        rank.access.serve("is at the end")
        return [rank.variables[name].numpy() for name in WHOLES]

    for first, second in of_ranks(work, 3):
        np.testing.assert_array_equal(first, WHOLES["first"] + 1)
        np.testing.assert_array_equal(second, WHOLES["second"] * 2)


def test_of_different_values_all_get_the_first():
    def work(rank):
        rank.variables["first"].assign(np.full([4, 3], rank.rank + 5.0))
        return rank.variables["first"].numpy()

    for value in of_ranks(work):
        np.testing.assert_array_equal(value, np.full([4, 3], 5.0))


def test_ranks_that_do_different_things_are_refused():
    def work(rank):
        name = [*WHOLES][rank.rank]
        with pytest.raises(TowerError) as caught:
            rank.variables[name].numpy()
        return str(caught.value)

    for text in of_ranks(work):
        assert "rank 0 reads variable 'first'" in text
        assert "rank 1 reads variable 'second'" in text


def test_ranks_that_wait_at_different_places_are_refused():
    def work(rank):
        with pytest.raises(TowerError, match="do different things"):
            rank.access.serve(f"is at place {rank.rank}")

    of_ranks(work)


def test_a_variable_that_another_rank_lacks_is_refused():
    def work(rank):
        if rank.rank == 0:
            added = rank.divided("first")
            added.place = "another"
            rank.access.register(added)
            with pytest.raises(TowerError):
                rank.access.take_part(
                    [joint_access.Action("reads", "lost", "lost"), None]
                )
            return
        with pytest.raises(TowerError, match="rank 1 does not have"):
            rank.access.take_part(
                [joint_access.Action("reads", "another", "first"), None]
            )

    of_ranks(work)


@pytest.mark.parametrize(
    ("gone", "waits"), [({}, True), ({"rank 1": TaskState.ENDED}, False)]
)
def test_who_waits_for_the_others_at_the_end_of_the_script(
    monkeypatch, gone, waits
):
    monkeypatch.setattr(joint_access.watch, "gone_ranks", lambda: gone)
    # pytest has set it if a test before has failed.
    monkeypatch.delattr(sys, "last_value", raising=False)
    served = []

    class Access:
        def serve(self, why):
            served.append(why)

    joint_access._serve_at_exit(Access())
    assert bool(served) == waits


def test_ranks_tell_what_they_save_and_serve_meanwhile():
    def work(rank):
        told = []
        if rank.rank == 0:
            rank.variables["first"].numpy()
        if rank.rank == 2:
            rank.access.serve("is at the end")
        else:
            told = rank.access.meet(f"saves {rank.rank}")
            rank.access.serve("is at the end")
        return told

    told = ["saves 0", "saves 1", ""]
    assert of_ranks(work, 3) == [told, told, []]


def test_what_is_left_in_shards_becomes_ordinary_when_it_is_read():
    def work(rank):
        variable, made = rank.variables["first"], []

        def restore(whole):
            made.append(tf.Variable(whole))
            return made[0]

        variable.leave_block(restore)
        assert not made
        variable.assign_add(tf.ones([4, 3]))
        ((shard,),) = variable.shards
        assert shard.numpy().size == 0
        return made[0].numpy(), variable.numpy()

    for ordinary, value in of_ranks(work):
        np.testing.assert_array_equal(ordinary, WHOLES["first"] + 1)
        np.testing.assert_array_equal(value, ordinary)


def test_lone_reads_where_ranks_do_not_meet_are_refused():
    def work(rank):
        access = joint_access.refusing("in on_batch_end of Mine")
        with (
            rank.access.known.take_action.holding(access),
            pytest.raises(TowerError, match="in on_batch_end of Mine"),
        ):
            rank.variables["first"].numpy()
        return rank.held().shape

    assert of_ranks(work) == [(2, 3), (2, 3)]


def test_what_ranks_keep_for_one_another_is_freed():
    class InShards:
        place = "1.0"

    known, owner = KnownVariables(), InShards()
    variable = InShards()
    known.by_place[variable.place] = variable
    known.keep(variable, weakref.ref(owner))
    gone = weakref.ref(variable)
    del variable
    assert known.by_place.get("1.0") is gone()
    assert known.unused() == []
    del owner
    assert known.unused() == ["1.0"]
    known.forget(["1.0"])
    assert known.by_place.get("1.0") is None
    assert gone() is None
