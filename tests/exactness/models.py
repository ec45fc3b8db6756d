"""Small data and models for the exactness tests."""

from keras_towers.conformance.models import *  # noqa: F403
