"""Keys and numbers of collectives: alike on all ranks, never twice."""

import hashlib
from types import SimpleNamespace

import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.engines.runtime import collective_transport
from keras_towers.transport.keys import next_key

pytestmark = pytest.mark.core


def test_eager_calls_need_no_number():
    assert next_key("sum") == next_key("sum") == "kt.sum.eager"


def test_every_function_counts_anew_over_its_inner_ones():
    seen = []

    def note():
        seen.append(next_key("sum"))
        return 0

    @tf.function
    def inner():
        return note()

    @tf.function(autograph=False)
    def outer(x):
        note()
        tf.cond(tf.constant(True), note, lambda: 1)
        inner()
        seen.append(next_key("other"))

    # A second trace uses the same keys.
    for size in (2, 3):
        outer(tf.zeros([size]))
        assert seen[:2] == ["kt.sum.1", "kt.sum.2"]
        assert seen[-1] == "kt.other.1"
        seen.clear()


def test_numbers_depend_on_what_is_asked_only():
    first = collective_transport.InstanceKeys()
    second = collective_transport.InstanceKeys()
    names = [("kt.sum.1", "float32"), ("kt.sum.2", "float32"), ("kt.sum.1", 8)]
    numbers = [first.number(*name) for name in names]
    assert numbers == [second.number(*name) for name in reversed(names)][::-1]
    assert numbers == [first.number(*name) for name in names]
    assert len(set(numbers)) == 3
    assert all(0 <= number < 2**31 for number in numbers)


def test_two_collectives_with_one_number_are_refused(monkeypatch):
    same = SimpleNamespace(digest=lambda: b"same")
    monkeypatch.setattr(hashlib, "blake2b", lambda *args, **kwargs: same)
    keys = collective_transport.InstanceKeys()
    assert keys.number("a") == keys.number("a")
    with pytest.raises(TowerError, match="'a' and 'b' have the same number"):
        keys.number("b")
