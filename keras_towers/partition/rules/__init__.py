"""What operations make of rows and of parts of sums, by families."""

from keras_towers.partition.rules import (  # noqa: F401
    batched,
    control_flow,
    draws,
    elementwise,
    indexing,
    lists,
    means,
    places,
    ragged,
    reductions,
    shapes,
    slices,
)
