"""Notes about objects, which go with the objects."""

import gc

import keras
import pytest

from keras_towers.fit.context.identity_dict import IdentityDict, IdentityKey


def test_equal_objects_are_different_keys():
    notes: IdentityDict[keras.Variable, str] = IdentityDict()
    one, other = keras.Variable(1.0), keras.Variable(1.0)
    notes[one] = "one"
    assert one in notes and other not in notes
    assert notes.setdefault(one, "again") == "one"
    assert notes.setdefault(other, "other") == "other"
    assert [id(key) for key in notes] == [id(one), id(other)]
    # Forgetting while iterating.
    for key in notes:
        del notes[key]
    assert not list(notes)
    for use in (notes.__getitem__, notes.__delitem__):
        with pytest.raises(KeyError):
            use(one)


def test_keys_are_equal_while_their_object_lives():
    one, other = keras.Variable(1.0), keras.Variable(1.0)
    key, same = IdentityKey(one), IdentityKey(one)
    assert len({key, same, IdentityKey(other)}) == 2
    assert (key == same, key != same) == (True, False)
    assert key != one
    del one
    gc.collect()
    assert len({key, same}) == 2
    assert key != same


def test_an_object_with_the_id_of_a_dead_one_is_new():
    notes: IdentityDict[object, str] = IdentityDict()
    for number in range(100):

        class Thing:
            pass

        thing = Thing()
        assert thing not in notes
        notes[thing] = str(number)
        assert notes[thing] == str(number)
    del thing, Thing
    gc.collect()
    assert not list(notes)
