"""Values that ranks send one another as data."""

import json
import pickle

import numpy as np
import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.transport import plain_values
from tests.reduction.ranks import on_ranks

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 2**70, -1.5, "ü", b"\x00\xff", [], (), {}),
        (1, [2, (3,)], {"a": None, 4: {5, 6}, (7, 8): frozenset({9})}),
        {"dict": [["a", 1]]},
        np.float32(1.5),
    ],
)
def test_values_come_back_as_they_were(value):
    found = plain_values.decode(plain_values.encode(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2],
        np.array(["a", "bcd"]),
        np.zeros((0, 3)),
        np.array([1 + 2j], "complex64"),
        np.array([1.5, 2], tf.bfloat16.as_numpy_dtype),
        np.array([np.nan, np.inf]),
    ],
)
def test_arrays_come_back_as_they_were(array):
    found = plain_values.decode(plain_values.encode(array))
    assert found.dtype.newbyteorder("=") == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)
    found[...] = found  # It may be written to.


def test_what_is_no_data_is_refused():
    for value in (object(), {"a": [print]}, np.array([{}])):
        with pytest.raises(TowerError, match="cannot be sent to other ranks"):
            plain_values.encode(value)


OF_OBJECTS = {"array": ["object", [1], "AAAAAAAAAAA="]}
OTHERS = {"object": []}, OF_OBJECTS, {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "data",
    [pickle.dumps([1]), *(json.dumps(other).encode() for other in OTHERS)],
)
def test_what_others_wrote_is_not_read(data):
    with pytest.raises(ValueError):
        plain_values.decode(data)


@pytest.mark.parametrize("lengths", [(0, 3, 1), (0, 505, 506), (3000, 2, 600)])
def test_short_values_are_gathered_in_one_exchange(lengths):
    # As text, with quotes.
    values = ["x" * length for length in lengths]
    found, keys = on_ranks(
        len(values),
        lambda t: plain_values.gather(t.all_gather, t.size, values[t.rank]),
    )
    assert found == [values] * len(values)
    is_short = max(lengths) <= 4 * plain_values.FIRST_WORDS - 2
    assert keys == ["kt.values.first", *([] if is_short else ["kt.values"])]
