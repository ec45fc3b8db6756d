"""Which place each rank gets."""

import pytest

from keras_towers import TowerError
from keras_towers.launching.slots import assign, slots

pytestmark = pytest.mark.core


def numbers(found):
    return [
        (slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size)
        for slot in found
    ]


def test_ranks_that_go_round_the_hosts():
    assert numbers(slots(["a", "b", "a", "b", "a"])) == [
        *((0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2)),
        *((1, 2, 1, 2), (2, 3, 0, 1)),
    ]


def test_one_host_after_another_is_filled():
    found = assign({"a": 2, "b": 3, "c": 1}, 4)
    assert [slot.hostname for slot in found] == ["a", "a", "b", "b"]
    assert [(slot.rank, slot.size) for slot in found] == [
        (rank, 4) for rank in range(4)
    ]
    assert numbers(found) == [
        *((0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2))
    ]


def test_more_ranks_than_slots():
    with pytest.raises(TowerError, match="7 processes do not fit .* 6 slots"):
        assign({"a": 2, "b": 4}, 7)
