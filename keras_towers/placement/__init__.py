"""Which device holds a variable, and on which device its readers keep a copy.

Plain pieces: nothing here knows Keras, or makes a variable.
"""

from keras_towers.placement.caching import CachingPlacement, ReadCache
from keras_towers.placement.least_loaded import (
    LeastLoadedPlacement,
    Placed,
    byte_size,
)

__all__ = [
    "CachingPlacement",
    "LeastLoadedPlacement",
    "Placed",
    "ReadCache",
    "byte_size",
]
