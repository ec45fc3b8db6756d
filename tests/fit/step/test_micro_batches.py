"""Each tower takes its rows in parts, with the results of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.exactness import models as m
from tests.kit.compare import assert_exact, assert_same, outcome
from tests.kit.training import X, Y, adam, classifier, compiled, fit, stacked
