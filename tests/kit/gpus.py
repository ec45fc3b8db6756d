"""The devices of the tests in ``tests/gpu``.

`make test-gpu` starts a session on GPUs. In any other session these tests are
on logical CPUs, which are then used as GPUs are.
"""

import os

# What a session for all of them is on: "gpu", or "cpu" to try them.
# Any other runs some of them.
VARIABLE = "KERAS_TOWERS_TESTS_ON"
ON = os.environ.get(VARIABLE, "")
KIND = ON or "cpu"

# Set where the ranks of a job share one GPU.
SHARED = "KERAS_TOWERS_TESTS_SHARE_GPU"

# What one GPU is split into, and what a logical GPU may take of its memory: the
# rest is for the processes that a test starts.
PARTS = 4
MEMORY_MIB = 1024


def use():
    """Configure the session's devices, before TensorFlow starts.

    One GPU is split; of several each is one tower. TensorFloat-32 has 10 bits,
    too few for weights that are to be compared.
    """
    # Who only starts such a session needs neither.
    import tensorflow as tf

    import keras_towers as kt

    tf.config.experimental.enable_tensor_float_32_execution(False)
    gpus = tf.config.list_physical_devices("GPU")
    if ON == "cpu":
        kt.virtual_towers(PARTS)
    elif len(gpus) == 1:
        kt.virtual_towers(PARTS, memory_limit=MEMORY_MIB)
    else:
        for gpu in gpus:
            part = tf.config.LogicalDeviceConfiguration(MEMORY_MIB)
            tf.config.set_logical_device_configuration(gpu, [part])
