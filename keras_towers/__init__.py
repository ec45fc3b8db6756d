"""Train an existing Keras model on many devices by one line around ``fit``.

>>> import keras_towers as kt
>>> with kt.TowerStrategy():
...     model.fit(x, y)
"""

from keras_towers import _requirements  # noqa: F401  checks before the rest
from keras_towers.devices import virtual_towers
from keras_towers.errors import CompatibilityError, TowerError
from keras_towers.reduction import GradientPacker
from keras_towers.strategies.tower import TowerStrategy

__version__ = "0.1.0"

__all__ = [
    "CompatibilityError",
    "GradientPacker",
    "TowerError",
    "TowerStrategy",
    "virtual_towers",
]
