"""Tensors as words that can be added without loss."""

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.engines.byteps.byteps_transport import tensor_of, words_of

DTYPES = (
    *(tf.bool, tf.int8, tf.uint16, tf.float16, tf.bfloat16, tf.int32),
    *(tf.uint32, tf.float32, tf.int64, tf.complex64, tf.complex128),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)], ids=str)
def test_bits_come_back(dtype, shape):
    count = int(np.prod(shape))
    bits = np.random.default_rng(0).integers(0, 256, (count, dtype.size))
    if dtype == tf.bool:
        bits %= 2
    array = bits.astype(np.uint8).view(dtype.as_numpy_dtype).reshape(shape)
    tensor = tf.constant(array)
    words = words_of(tensor)
    assert words.dtype == tf.int32
    # As another rank does that adds nothing.
    back = tensor_of(words + tf.zeros_like(words), dtype, tensor.shape)
    assert back.dtype == dtype and back.shape == shape
    assert back.numpy().tobytes() == array.tobytes()
