"""Sums through memory that the processes of a machine share."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.reduction import shared_memory
from keras_towers.reduction.rank_sum import RankSum
from keras_towers.reduction.shared_memory import (
    MIN_BYTES,
    SharedMemoryAllReduce,
)
from keras_towers.reduction.stateful_hooks import NesterovMomentum, as_stateful
from tests.reduction.cases import assert_sums
from tests.reduction.ranks import Owner, on_ranks, random_rows, summed

LARGE = MIN_BYTES // 4
SHAPES = [(3, 5), (), (LARGE // 7, 7), (0, 2), (11,), (LARGE + 1,)]


def with_momentum(hook):
    return NesterovMomentum(as_stateful(hook), 0.9)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def run(size, steps=1, dtype=tf.float32, shapes=SHAPES):
    """Sum on so many ranks; returns the keys of what they have exchanged."""
    rows = [random_rows(size, shapes, dtype, step) for step in range(steps)]

    def rank(transport):
        exchange = SharedMemoryAllReduce()
        return [exchange(transport, row[transport.rank], "k") for row in rows]

    results, keys = on_ranks(size, rank)
    for found, row in zip(zip(*results, strict=True), rows, strict=True):
        assert_sums(found, row, 1e-5)
    return keys


def plain(keys):
    """The keys under which the transport has summed instead."""
    return [key for key in keys if key.endswith("plain")]


@pytest.mark.parametrize(("size", "dtype"), [(2, tf.float64), (3, tf.float32)])
def test_sums_step_after_step(size, dtype, folder):
    assert not plain(run(size, steps=3, dtype=dtype))
    assert not list(folder.iterdir())


def test_what_is_small_or_of_other_dtypes_goes_by_the_transport():
    assert run(2, shapes=[(3,), (4, 4)]) == ["k"]
    row = tf.ones([LARGE]), tf.constant([2]), tf.ones([1], tf.float16)
    results, _ = on_ranks(2, lambda t: SharedMemoryAllReduce()(t, row, "k"))
    for result in results:
        assert [t.dtype for t in result] == [t.dtype for t in row]
        assert [float(t[0]) for t in result] == [2, 4, 2]


def test_without_room_the_transport_sums(monkeypatch, folder):
    monkeypatch.setattr(shared_memory, "FOLDER", folder / "missing")
    assert plain(run(2, steps=2)) == ["k.0.plain"] * 2


def test_a_rank_that_sees_no_other_one(monkeypatch):
    original = shared_memory.SharedMemory._map

    def map_own_only(memory, name):
        if memory.rank == 1:
            raise FileNotFoundError(name)
        return original(memory, name)

    monkeypatch.setattr(shared_memory.SharedMemory, "_map", map_own_only)
    assert plain(run(3, steps=3)) == ["k.0.plain"] * 3


def test_a_rank_that_was_started_anew():
    meetings = []

    def rank(transport):
        exchange = SharedMemoryAllReduce()
        for step in range(3):
            if step == 1 and transport.rank == 1:
                exchange = SharedMemoryAllReduce()
            (total,) = exchange(transport, [tf.ones([LARGE])], "k")
            meetings.append(np.unique(total).tolist())

    _, keys = on_ranks(2, rank)
    assert meetings == [[2]] * 6
    assert plain(keys) == ["k.0.plain"] * 2


def test_a_rank_takes_no_room_for_its_own_share(folder):
    ones = np.ones(LARGE, np.float32)
    taken = []
    for rank in range(4):
        memory = shared_memory.SharedMemory(rank, 4)
        shared_memory.SharedBucket(memory, [[LARGE]], ones.dtype).post(ones)
        (file,) = folder.iterdir()
        taken.append(512 * file.stat().st_blocks / ones.nbytes)
        del memory
    # Rank 0 has the sums too.
    np.testing.assert_allclose(taken, [1.75, 0.75, 0.75, 0.75], atol=0.1)


def test_buckets_share_memory_that_is_as_large_as_the_largest(monkeypatch):
    """Also one that is larger than those before, and one of another dtype."""
    made = []
    create = shared_memory.SharedMemory._create

    def counted(memory, room):
        made.append(sum(room))
        create(memory, room)

    monkeypatch.setattr(shared_memory.SharedMemory, "_create", counted)
    monkeypatch.setattr(shared_memory, "BUCKET_BYTES", 1)
    rows = [
        random_rows(2, shapes, dtype)
        for shapes, dtype in (
            ([(LARGE,), (LARGE // 2, 2), (LARGE // 2,)], tf.float32),
            ([(2 * LARGE,), (LARGE,)], tf.float32),
            ([(LARGE // 2,), (LARGE,)], tf.float64),
        )
    ]

    def rank(transport):
        exchange = SharedMemoryAllReduce()
        return [
            exchange(transport, row[transport.rank], "k") for row in 2 * rows
        ]

    results, keys = on_ranks(2, rank)
    assert not plain(keys)
    for found, row in zip(zip(*results, strict=True), 2 * rows, strict=True):
        assert_sums(found, row, 1e-5)
    # For 1/2, 1 and 2 of MIN_BYTES: half of it, and on rank 0 all sums.
    taken = [size / MIN_BYTES for size in sorted(made)]
    assert taken == [0.25, 0.5, 0.75, 1, 1.5, 3]


def test_infinities_arrive_and_results_survive_the_next_step():
    value = np.ones(LARGE, np.float32)
    value[:3] = [np.inf, np.nan, 3e38]

    def in_turn(transport, row, key):
        exchange = SharedMemoryAllReduce()
        return [exchange(transport, [x], key)[0] for x in row]

    row = [value, 3 * tf.ones([LARGE])]
    for first, second in summed(in_turn, [row, row])[0]:
        np.testing.assert_array_equal(first[:4], [np.inf, np.nan, np.inf, 2])
        assert np.unique(first[3:]) == [2]
        assert np.unique(second) == [6]


@pytest.mark.parametrize("wrap", [lambda hook: hook, with_momentum])
def test_a_sum_says_what_memory_its_hook_keeps(wrap):
    """Also that of a hook within another one."""

    def kept(transport):
        hook = SharedMemoryAllReduce()
        rank_sum, gradients = RankSum(transport, wrap(hook)), [tf.ones([LARGE])]
        before = rank_sum.kept_bytes
        rank_sum.sum(Owner(), [Owner()], gradients)
        assert hook.kept_bytes >= 4 * LARGE
        return before, rank_sum.kept_bytes == hook.kept_bytes

    assert on_ranks(2, kept)[0] == [(0, True)] * 2
