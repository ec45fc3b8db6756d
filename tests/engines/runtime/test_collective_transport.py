"""Keys of collectives: equal on all ranks, and unique."""

import hashlib
from types import SimpleNamespace

import pytest

from keras_towers import TowerError
from keras_towers.engines.runtime import collective_transport
from keras_towers.engines.runtime.collective_transport import instance_key

pytestmark = pytest.mark.core


def test_keys_depend_on_the_name_only():
    names = [("kt.sum.1", "float32"), ("kt.sum.2", "float32"), ("kt.sum.1", 8)]
    numbers = [instance_key(*name) for name in names]
    assert numbers == [instance_key(*name) for name in names]
    assert len(set(numbers)) == 3
    assert all(0 <= number < 2**31 for number in numbers)


def test_two_collectives_with_one_number_are_refused(monkeypatch):
    same = SimpleNamespace(digest=lambda: b"same")
    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **kwargs: same)
    monkeypatch.setattr(collective_transport, "_names", {})
    assert instance_key("a") == instance_key("a")
    with pytest.raises(TowerError, match="'a' and 'b' have the same number"):
        instance_key("b")
