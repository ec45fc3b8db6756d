"""A step up to its gradients, with the updates as a second part."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_towers.fit.step.backward import Backward
from tests.exactness import models as m
from tests.kit.compare import same_model
from tests.kit.training import X, adam


@pytest.mark.core
def test_gradients_then_updates_are_the_whole_step():
    def make():
        keras.utils.set_random_seed(3)
        model = m.Gan()
        model.compile(adam(clipnorm=0.1), m.momentum())
        model(X)
        return model

    whole, halves = make(), make()
    backward = Backward(halves, halves.train_step)
    run = tf.function(backward, jit_compile=True, autograph=False)
    for _ in range(3):
        whole.train_step(tf.constant(X))
        before = halves.get_weights()
        _, gradients = run(tf.constant(X))
        for weight, value in zip(halves.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weight, value)
        backward.update(gradients)
    same_model(halves, whole, 1e-5)
