"""Which device holds a variable.

Nothing here depends on Keras or creates variables.
"""

from keras_towers.placement.least_loaded import (
    LeastLoadedPlacement,
    Placed,
    byte_size,
)

__all__ = [
    "LeastLoadedPlacement",
    "Placed",
    "byte_size",
]
