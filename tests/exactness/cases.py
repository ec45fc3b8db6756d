"""Every case of the exactness contract."""

from keras_towers.conformance.cases import *  # noqa: F403
