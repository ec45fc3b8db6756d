"""What Keras computes from several examples of a batch at once.

That each class does so exactly is shown with all other classes.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_towers as kt
from keras_towers.fit import contract
from tests.kit.compare import assert_exact, close

RANDOM = np.random.default_rng(0)
# The last batch has one example, fewer than there are towers.
IMAGES = RANDOM.random((17, 4, 4, 3)).astype("float32")
TARGETS = RANDOM.normal(size=(17, 1)).astype("float32")


def around(*middle):
    """A model with some layers, and its data."""
    keras.utils.set_random_seed(4)
    ends = layers.Flatten(), layers.Dense(1)
    model = keras.Sequential([layers.Input((4, 4, 3)), *middle, *ends])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, IMAGES, TARGETS


def elastic():
    keras.utils.set_random_seed(5)
    return around(
        layers.Dense(3, "sigmoid"),
        layers.RandomElasticTransform(value_range=(0, 1)),
    )


def test_batches_of_a_fixed_size():
    """Keras transforms each image where it knows how many there are."""
    data = tf.data.Dataset.from_tensor_slices((IMAGES, TARGETS))
    data = data.take(8).batch(4, drop_remainder=True)
    assert_exact(
        lambda: elastic()[0],
        lambda model: model.fit(data, verbose=0),
        kt.TowerStrategy(2),
        tolerance=1e-5,
    )


def test_mixing_leaves_predictions_alone():
    model, x, _ = around(layers.MixUp(seed=3))
    wanted = model.predict(x, verbose=0)
    with kt.TowerStrategy(3):
        close(model.predict(x, verbose=0), wanted)


def by_hand():
    """What Keras divides by the replicas, where none of them runs."""
    x = np.arange(6.0, dtype="float32")[:, np.newaxis]
    dense = layers.Dense(
        1, activity_regularizer="l1", kernel_initializer="ones"
    )
    model = keras.Sequential([layers.Input((1,)), dense])
    model.compile("sgd", "mae", metrics=["mse"])
    loss, mapped = keras.losses.MeanSquaredError(), tf.data.Dataset
    mapped = mapped.from_tensors(x).map(lambda each: loss(each, 3 * each))
    count = keras.metrics.Sum(dtype="int32")
    count.update_state([3])
    count.update_state([4])
    return {
        "loss": float(loss(x, 3 * x)),
        "in a function": float(tf.function(loss)(x, 3 * x)),
        "in a map": float(next(iter(mapped))),
        "of a model": float(model.compute_loss(x, 2 * x, model(x))),
        "a step": {k: float(v) for k, v in model.test_step((x, 2 * x)).items()},
        "a count": int(count.result()),
    }


@pytest.mark.parametrize(
    "strategy",
    [
        *(kt.TowerStrategy, kt.ParameterServerTowerStrategy),
        *(kt.AsyncTowerStrategy, kt.SyncReplicasStrategy),
    ],
)
def test_outside_of_steps_losses_are_those_of_one_device(strategy):
    alone = by_hand()
    assert alone["a count"] == 7
    with strategy(towers=3) as towers:
        assert by_hand() == alone
        assert towers.num_replicas_in_sync == 3
        assert contract.in_force() is towers
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        # Keras's own; TensorFlow's strategies are none of ours.
        assert by_hand()["loss"] == alone["loss"] / 2


def test_losses_in_callbacks_and_in_a_loop_of_ones_own():
    model, x, y = around()
    loss, found = keras.losses.MeanSquaredError(), []

    def note(*args, **logs):
        found.append(float(loss(y, model(x))))

    with kt.TowerStrategy(2) as towers:
        note()
        noted = keras.callbacks.LambdaCallback(
            on_train_batch_end=note, on_epoch_end=note
        )
        history = model.fit(x, y, batch_size=17, verbose=0, callbacks=[noted])
        # There each replica divides by their number, to add up to a mean.
        parts = towers.run(lambda: loss(y, model(x)))
        added = towers.reduce("SUM", parts, axis=None)
        each = towers.experimental_local_results(parts)
    close(found[0], history.history["loss"][0])
    assert found[1] == found[2] == float(loss(y, model(x)))
    close(float(added), found[2])
    assert len(each) == 2 and float(each[0]) == found[2] / 2
