"""Notes about objects, which go with the objects."""

import gc

import keras
import pytest

from keras_towers.fit.context.by_identity import ByIdentity


def variable(value=1.0):
    return keras.Variable(value)


def test_equal_objects_are_different_keys():
    notes: ByIdentity[keras.Variable, str] = ByIdentity()
    one, other = variable(), variable()
    notes[one] = "one"
    assert one in notes
    assert other not in notes
    assert notes[one] == "one"
    assert notes.setdefault(one, "again") == "one"
    assert notes.setdefault(other, "other") == "other"
    assert [id(key) for key in notes] == [id(one), id(other)]
    del notes[one]
    assert one not in notes
    for use in (notes.__getitem__, notes.__delitem__):
        with pytest.raises(KeyError):
            use(one)
    notes.clear()
    assert not list(notes)


def test_a_dead_object_is_forgotten():
    notes: ByIdentity[keras.Variable, str] = ByIdentity()
    kept, dropped = variable(), variable()
    notes[kept], notes[dropped] = "kept", "dropped"
    del dropped
    gc.collect()
    assert [notes[key] for key in notes] == ["kept"]


def test_an_object_with_the_id_of_a_dead_one_is_new():
    notes: ByIdentity[object, str] = ByIdentity()
    for number in range(100):

        class Thing:
            pass

        thing = Thing()
        assert thing not in notes
        notes[thing] = str(number)
        assert notes[thing] == str(number)


def test_objects_can_be_kept():
    notes: ByIdentity[keras.Variable, str] = ByIdentity(weak=False)
    notes[variable()] = "kept"
    gc.collect()
    assert [notes[key] for key in notes] == ["kept"]


def test_forgetting_while_iterating():
    notes: ByIdentity[keras.Variable, None] = ByIdentity()
    keys = [variable() for _ in range(3)]
    for key in keys:
        notes[key] = None
    for key in notes:
        del notes[key]
    assert not list(notes)
