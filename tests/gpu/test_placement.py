"""Where the parts of a model are, what they take, and where they stay."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.inspection.conformance.outcomes import Originals
from keras_towers.transport.devices import canonical
from tests.gpu.towers import some_on_cpus, strategy, towers
from tests.kit import gpus
from tests.kit.compare import assert_all_close
from tests.kit.training import classifier, fit

pytestmark = [pytest.mark.gpu, pytest.mark.alternate]


def places(values):
    return [canonical(value.device) for value in values]


def everywhere():
    return [canonical(tower) for tower in towers()]


def of_floats(variables):
    """What kernels on a GPU can hold; counters may be on the host."""
    return [v for v in variables if v.dtype.startswith("float")]


@pytest.mark.parametrize(
    "updates", some_on_cpus("each".__eq__, ["once", "each"])
)
def test_every_tower_has_a_replica(updates):
    model = classifier()
    with strategy(updates=updates):
        fit(model)
        # Logical CPUs share memory, where one copy is enough for all.
        shares = updates == "once" and gpus.KIND == "cpu"
        for weight in model.trainable_variables:
            held = getattr(weight._value, "values", [weight._value])
            assert places(held) == everywhere()[: 1 if shares else None]
        of = everywhere() if updates == "each" else everywhere()[:1]
        for slot in of_floats(model.optimizer.variables):
            if slot is not model.optimizer.learning_rate:
                held = getattr(slot._value, "values", [slot._value])
                assert places(held) == of, slot.path


def test_the_model_stays_on_its_gpu():
    with tf.device(towers()[-1]):
        model = classifier()
        # As Keras does by itself on GPUs.
        model.jit_compile = True
        originals = Originals(model)
        weights = of_floats(model.variables)
        before = places(v._value for v in weights)
    assert before[0] == everywhere()[-1]
    for make in (kt.TowerStrategy, kt.ParameterServerTowerStrategy):
        with strategy(make):
            fit(model)
        originals.assert_back()
        assert places(v._value for v in weights) == before


def test_a_replica_computes_on_the_device_of_its_tower():
    seen = {}

    def compute():
        made = tf.random.normal([3])
        seen[kt.current_tower().index] = places([made, made + 1])

    strategy().run(compute)
    assert seen == {k: [place] * 2 for k, place in enumerate(everywhere())}


def used():
    """The MiB that each tower holds."""
    look = tf.config.experimental.get_memory_info
    names = [tower.split("/device:")[1] for tower in towers()]
    return np.array([look(name)["current"] for name in names]) / 2**20


class Widened(keras.layers.Layer):
    """Takes several MiB for each row."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(512,))

    def call(self, x):
        wide = tf.tanh(x[:, :, None, None] * self.kernel[:, None])
        return tf.reduce_mean(wide * tf.ones([512]), [2, 3])


_ON_GPUS_ONLY = pytest.mark.skipif(
    gpus.KIND == "cpu", reason="TensorFlow knows the memory of GPUs only"
)


@_ON_GPUS_ONLY
def test_a_step_that_runs_out_of_memory_takes_smaller_parts(caplog):
    # A row takes a MiB in each of some tensors, and a tower has 1024.
    x = np.random.default_rng(0).random((600, 1), "float32")

    def trained(parts):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([Widened(), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
        with strategy(number=1, micro_batches=parts):
            model.fit(x, x, batch_size=len(x), epochs=2, verbose=0)
        return model.get_weights()

    with caplog.at_level("INFO", "keras_towers"):
        found = trained("auto")
    assert "ran out of memory" in caplog.text
    assert_all_close(found, trained(100), 1e-5)


@_ON_GPUS_ONLY
@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_weights(shared):
    # A model of 64 MiB whose optimizer keeps nothing.
    large = keras.layers.Dense(4096, use_bias=False)
    model = keras.Sequential([keras.Input((4096,)), large])
    model.compile("sgd", "mse")
    servers = kt.ParameterServerTowerStrategy
    on = strategy(servers, ps_device="towers") if shared else strategy()
    before = used()
    with on:
        on.adopt(model)
        inside = used() - before
    if shared:
        # One copy at most, beside the user's own.
        assert sum(inside) <= 64 + 4
    else:
        # The first tower's replica is the user's own.
        others = [64] * (len(towers()) - 1)
        assert inside == pytest.approx([0, *others], abs=4)
    assert used() - before == pytest.approx(np.zeros(len(towers())), abs=4)
