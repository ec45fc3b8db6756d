"""The numbers of collectives."""

import hashlib
import itertools

import pytest

from keras_towers import TowerError
from keras_towers.transport import instances

pytestmark = pytest.mark.core


def test_numbers_depend_on_what_is_asked_only():
    first, second = instances.InstanceKeys(), instances.InstanceKeys()
    names = [("kt.sum.1", "float32"), ("kt.sum.2", "float32"), ("kt.sum.1", 8)]
    numbers = [first.number(*name) for name in names]
    assert numbers == [second.number(*name) for name in reversed(names)][::-1]
    assert numbers == [first.number(*name) for name in names]
    assert len(set(numbers)) == 3
    assert all(0 <= number < 2**31 for number in numbers)


def test_two_collectives_with_one_number_are_refused(monkeypatch):
    class Same:
        def __init__(self, data, digest_size):
            pass

        def digest(self):
            return b"same"

    monkeypatch.setattr(hashlib, "blake2b", Same)
    keys = instances.InstanceKeys()
    assert keys.number("a") == keys.number("a")
    with pytest.raises(TowerError, match="'a' and 'b' have the same number"):
        keys.number("b")


def test_rooms_grow_slowly_and_are_never_empty():
    rooms = instances.ROOMS
    assert rooms[0] > 0 and rooms[-1] > 2**38
    pairs = itertools.pairwise(rooms)
    assert all(small < large <= 1.25 * small for small, large in pairs)
