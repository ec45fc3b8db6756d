"""Which device holds a variable.

Plain pieces: nothing here knows Keras, or makes a variable.
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
