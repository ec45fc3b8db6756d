"""Where segments of a step end."""

import pytest

from keras_towers.partition.timeline.segments import ends_of_segments

HELD = range(0, 101, 10)


@pytest.mark.parametrize(
    ("few", "size", "ends"),
    [
        # At the first of equal places, and no earlier than half of the size.
        ({}, 30, [2, 4, 6, 10]),
        ({}, 25, [2, 4, 6, 8, 10]),
        ({}, 1, [1, 2, 3, 4, 5, 6, 7, 8, 10]),
        ({}, 1000, [10]),
        # Where few bytes pass.
        ({3: 20, 7: 19}, 40, [3, 7, 10]),
        ({3: 20, 7: 19}, 60, [3, 10]),
        # What differs by little is alike.
        ({2: 20.3, 3: 20}, 40, [2, 4, 6, 10]),
    ],
)
def test_segments_end_where_they_are_full_and_few_bytes_pass(few, size, ends):
    crossing = [few.get(k, 50) for k in range(len(HELD))]
    assert ends_of_segments(HELD, crossing, size) == ends
