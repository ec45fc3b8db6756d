"""What tells the data of ranks apart."""

import numpy as np
import pytest

from keras_towers import compat
from keras_towers.fit.data import ranks

pytestmark = pytest.mark.core


def digest(x, y=None):
    return ranks.digest(compat.ArrayDataAdapter(x, y, batch_size=2))


def strings(*values):
    # Each a new object, as in another process.
    return np.array(["".join(list(value)) for value in values], object)


def test_equal_arrays_have_equal_digests():
    x = np.arange(12.0).reshape(6, 2)
    assert digest(x, x[:, 0]) == digest(x.copy(), x[:, 0].copy())
    assert digest(strings("one", "two")) == digest(strings("one", "two"))


def test_others_have_others():
    x = np.arange(20.0)
    other_end = x.copy()
    other_end[-1] = 0
    found = {
        digest(x),
        digest(x + 1),
        digest(x, x),
        digest(x.astype("float32")),
        digest(other_end),
        digest(strings("one", "two")),
        digest(strings("one", "three")),
    }
    assert len(found) == 7
