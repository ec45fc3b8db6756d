"""What operations make of rows and of parts of sums, by families."""

from keras_towers.partition.rules import (  # noqa: F401
    addresses,
    control_flow,
    draws,
    elementwise,
    images,
    lists,
    loops,
    moves,
    picks,
    places,
    products,
    ragged,
    reductions,
    segments,
    shapes,
    slices,
    sparse,
)
