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


def test_equal_arrays_have_equal_digests_and_others_others():
    def digests():
        x = np.arange(20.0)
        datas = [(x,), (x + 1,), (x, x), (x.astype("float32"),), (x % 19,)]
        words = [(strings("one", other),) for other in ("two", "three")]
        return [digest(*data) for data in datas + words]

    found = digests()
    assert found == digests()
    assert len(set(found)) == 7
