"""Assertions that a model is an ordinary Keras model."""

from keras_towers.conformance.ordinary import *  # noqa: F403
