"""What ``keras-towers verify`` is given in its tests."""

import keras
import tensorflow as tf

from tests.verification import models as m


def safe():
    return m.compiled(m.classifier()), m.FEATURES, m.TARGETS


def unsafe():
    model = m.compiled(m.classifier(keras.layers.BatchNormalization()))
    data = tf.data.Dataset.from_tensor_slices((m.FEATURES, m.TARGETS))
    return model, data.batch(8)


def fails():
    raise ValueError("no data today")


def only_a_model():
    return m.classifier()


def uncompiled():
    return m.classifier(), m.FEATURES, m.TARGETS
