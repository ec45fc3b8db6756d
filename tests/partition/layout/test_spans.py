"""Which range of an axis a slice selects, as far as it is known."""

import types

import pytest

from keras_towers.partition.ir.sizes import EXAMPLES, UNKNOWN
from keras_towers.partition.layout.spans import spans

pytestmark = pytest.mark.core

N = EXAMPLES
FAR = 2**31 - 1


@pytest.mark.parametrize(
    ("begin", "end", "stride", "wanted"),
    [
        (0, 3 * N, 1, None),
        (0, FAR, 1, None),
        (0, N, 1, (0, N)),
        (N, 2 * N, 1, (N, N)),
        (N, FAR, 1, (N, 2 * N)),
        # Of an empty batch, neither counts from the end.
        (-1 * N, FAR, 1, (UNKNOWN, UNKNOWN)),
        (0, -1 * N, 1, (UNKNOWN, UNKNOWN)),
        (0, FAR, 3, (0, N)),
        (2, FAR, 3, (UNKNOWN, UNKNOWN)),
        (0, N, 3, (0, UNKNOWN)),
        (0, 4 * N, 1, (UNKNOWN, UNKNOWN)),
        (2 * N, N, 1, (UNKNOWN, UNKNOWN)),
        (N, 4, 1, (UNKNOWN, UNKNOWN)),
        (1, FAR, 1, (UNKNOWN, UNKNOWN)),
        (UNKNOWN, FAR, 1, (UNKNOWN, UNKNOWN)),
        (0, UNKNOWN, 1, (UNKNOWN, UNKNOWN)),
        (0, FAR, UNKNOWN, (UNKNOWN, UNKNOWN)),
        (2 * N, N, -1, (UNKNOWN, UNKNOWN)),
    ],
)
def test_slices_of_rows(begin, end, stride, wanted):
    node = types.SimpleNamespace(type="StridedSlice", attr=lambda name: 0)
    (found,) = spans(node, (3 * N,), [begin], [end], [stride])
    assert found.is_whole == (wanted is None)
    if wanted is not None:
        assert (found.begin, found.size) in ([*wanted], wanted)
        assert found.stride == (stride if stride is not UNKNOWN else 0)
