"""Which range of an axis a slice selects, as far as it is known."""

import itertools
import types

import pytest

from keras_towers.partition.ir.sizes import EXAMPLES, UNKNOWN
from keras_towers.partition.layout.spans import Span, spans, split_sizes

pytestmark = pytest.mark.core

N = EXAMPLES
FAR = 2**31 - 1


def _strided(shape, *ends, **masks):
    masks = {f"{name}_mask": mask for name, mask in masks.items()}
    node = types.SimpleNamespace(
        type="StridedSlice", attr=lambda name: masks.get(name, 0)
    )
    return spans(node, shape, *ends)


@pytest.mark.parametrize("stride", [-2, -1, 1, 2, 5])
def test_all_slices_of_an_axis_of_known_size(stride):
    for size, begin, end in itertools.product(
        (0, 1, 4), (None, *range(-5, 6)), (None, *range(-5, 6))
    ):
        masks = {"begin": begin is None, "end": end is None}
        (found,) = _strided((size,), [begin], [end], [stride], **masks)
        wanted = range(size)[begin:end:stride]
        if found.is_whole:
            assert wanted == range(size)
        else:
            of_span = range(size)[found.begin :: found.stride][: found.size]
            assert (of_span, found.size) == (wanted, len(wanted))


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
    (found,) = _strided((3 * N,), [begin], [end], [stride])
    assert found.is_whole == (wanted is None)
    if wanted is not None:
        assert (found.begin, found.size) in ([*wanted], wanted)
        assert found.stride == (stride if stride is not UNKNOWN else 0)


def test_new_and_dropped_axes_and_an_ellipsis():
    """As of ``x[None, 1, ..., 2:4]``."""
    found = _strided(
        (N, 5, 6, 7),
        [0, 1, 0, 2],
        [0, 2, 0, 4],
        [1, 1, 1, 1],
        new_axis=1,
        shrink_axis=2,
        ellipsis=4,
    )
    assert found == [
        Span(None),
        Span(0, 1, 1, dropped=True),
        *(Span(1), Span(2)),
        Span(3, 2, 2),
    ]
    assert not found[0].is_whole and found[2].is_whole
    assert _strided((4, N), [1], [3], [1]) == [Span(0, 1, 2), Span(1)]


@pytest.mark.parametrize(
    ("begin", "size", "wanted"),
    [
        (0, -1, Span(0)),
        (0, 2 * N, Span(0)),
        (0, N, Span(0, 0, N)),
        (N, -1, Span(0, N, N)),
        (N, N, Span(0, N, N)),
        (UNKNOWN, N, None),
    ],
)
def test_slices_by_their_size(begin, size, wanted):
    node = types.SimpleNamespace(type="Slice")
    first, second = spans(node, (2 * N, 3), [begin, 1], [size, -1])
    assert second == Span(1, 1, 2)
    if wanted is None:
        assert first.begin is UNKNOWN and first.size == N
    else:
        assert first == wanted


def test_split_sizes():
    assert split_sizes([N, -1], 3 * N) == [N, 2 * N]
    assert split_sizes([2, 3], 5) == [2, 3]
    assert split_sizes([2, -1, 1], 5) == [2, 2, 1]
    assert split_sizes([2, -1], UNKNOWN)[1] is UNKNOWN
